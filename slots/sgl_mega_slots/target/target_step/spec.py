"""What `target_step` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage

_HERE = "sgl_mega_slots.target.target_step"

TARGET_STEP = Slot(
    name="target_step",
    stage=Stage.TARGET,
    seam="target_forward",
    summary="a dense target's verify forward with LM head as one persistent kernel; bf16 or fp8 weights, 32 rows",
    default=False,
    requires=Requirements(
        isas=frozenset({"cpu", "sm_90", "sm_100", "sm_103", "sm_120"}),
        dtypes=frozenset({"bfloat16"}),
        max_batch=4,  # 32 rows
        declines=frozenset({"lora", "ragged_verify", "tensor_parallel", "dp_attention", "pipeline_parallel"}),
    ),
    numerics=Numerics(
        kind=NumericsKind.TOLERANCE,
        bound=2.0**-5,
        because=(
            "six roundings to bf16 a layer, 2**-9 each at one deviation or less, add up in squares: 2**-9 * sqrt(6 L), "
            "0.7 % of a row's size at the two layers of the cases; this is four and a half times that"
        ),
    ),
    implementation=f"{_HERE}.launch:TargetStep",
    reference=f"{_HERE}.reference:target_forward",
    cases=f"{_HERE}.cases:cases",
)
