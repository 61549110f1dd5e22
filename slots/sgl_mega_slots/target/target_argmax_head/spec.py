"""What `target_argmax_head` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.target.target_argmax_head"

TARGET_ARGMAX_HEAD = Slot(
    name="target_argmax_head",
    stage=Stage.TARGET,
    seam="target_argmax",
    summary="LM head with each row's argmax, no logits written; near ties may fall otherwise than the engine's",
    default=False,
    requires=Requirements(
        isas=TRITON_ISAS,
        declines=frozenset(
            {
                "grammar",
                "logit_adjustments",
                "logprobs",
                "ragged_verify",
                "tensor_parallel",
                "dp_attention",
                "pipeline_parallel",
                "lora",
            }
        ),
    ),
    numerics=Numerics(
        kind=NumericsKind.TOLERANCE,
        bound=2.0**-7,
        because=(
            "another fp32 order of the H products may flip the rounding of a logit: 2**-7 of it in bf16, less in fp16 "
            "and fp32. Tokens are equal wherever the best logit leads by more than that or every order is exact. At a "
            "nearer tie greedy output may differ from the engine's, as the engine's own does between batch sizes"
        ),
    ),
    implementation=f"{_HERE}.launch:TargetArgmaxHead",
    reference=f"{_HERE}.reference:target_argmax",
    cases=f"{_HERE}.cases:cases",
)
