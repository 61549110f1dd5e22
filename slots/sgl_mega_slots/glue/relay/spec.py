"""What `relay` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.glue.relay"

RELAY = Slot(
    name="relay",
    stage=Stage.GLUE,
    seam="relay",
    summary="lengths, bonus tokens and next anchors handed to the next step on the device",
    default=True,
    requires=Requirements(
        isas=TRITON_ISAS,
        declines=frozenset({"ragged_verify", "dp_attention", "pipeline_parallel"}),
    ),
    numerics=Numerics(kind=NumericsKind.BITWISE, because="integers only"),
    implementation=f"{_HERE}.launch:Relay",
    reference=f"{_HERE}.reference:relay",
    cases=f"{_HERE}.cases:cases",
)
