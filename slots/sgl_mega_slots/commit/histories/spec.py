"""What `histories` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.commit.histories"

HISTORIES = Slot(
    name="histories",
    stage=Stage.COMMIT,
    seam="history_commit",
    summary="the last token ids of each request, advanced by what was committed, in one launch",
    requires=Requirements(
        isas=TRITON_ISAS,
        declines=frozenset({"ragged_verify", "dp_attention", "pipeline_parallel"}),
    ),
    numerics=Numerics(kind=NumericsKind.BITWISE, because="integers only"),
    implementation=f"{_HERE}.launch:Histories",
    reference=f"{_HERE}.reference:history_commit",
    cases=f"{_HERE}.cases:cases",
)
