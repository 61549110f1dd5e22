"""What `step_inputs` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.glue.step_inputs"

STEP_INPUTS = Slot(
    name="step_inputs",
    stage=Stage.GLUE,
    seam="step_inputs",
    summary="positions, cache locations and draft inputs of a step in one launch",
    default=True,
    requires=Requirements(
        isas=TRITON_ISAS,
        declines=frozenset({"ragged_verify", "dp_attention", "pipeline_parallel"}),
    ),
    numerics=Numerics(kind=NumericsKind.BITWISE, because="integers only"),
    implementation=f"{_HERE}.launch:StepInputs",
    reference=f"{_HERE}.reference:step_inputs",
    cases=f"{_HERE}.cases:cases",
)
