"""What `params_once` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.glue.params_once"

PARAMS_ONCE = Slot(
    name="params_once",
    stage=Stage.GLUE,
    seam="step_params",
    summary="a step's sampling parameters staged for draft and accept in one launch",
    default=True,
    requires=Requirements(
        isas=TRITON_ISAS,
        declines=frozenset({"dp_attention", "pipeline_parallel"}),
    ),
    numerics=Numerics(kind=NumericsKind.BITWISE, because="comparisons and copies; no value is computed"),
    implementation=f"{_HERE}.launch:StepParams",
    reference=f"{_HERE}.reference:step_params",
    cases=f"{_HERE}.cases:cases",
)
