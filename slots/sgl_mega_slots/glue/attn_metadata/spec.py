"""What `attn_metadata` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.glue.attn_metadata"

ATTN_METADATA = Slot(
    name="attn_metadata",
    stage=Stage.GLUE,
    seam="attention_metadata",
    summary="lengths, running sums, page tables and slot lists of a step's attention in one launch",
    default=True,
    requires=Requirements(
        isas=TRITON_ISAS,
        declines=frozenset({"ragged_verify", "dp_attention", "pipeline_parallel"}),
    ),
    numerics=Numerics(kind=NumericsKind.BITWISE, because="integers only"),
    implementation=f"{_HERE}.launch:AttentionMetadata",
    reference=f"{_HERE}.reference:attention_metadata",
    cases=f"{_HERE}.cases:cases",
)
