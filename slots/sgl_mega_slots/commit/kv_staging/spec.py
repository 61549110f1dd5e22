"""What `kv_staging` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.commit.kv_staging"

KV_STAGING = Slot(
    name="kv_staging",
    stage=Stage.COMMIT,
    seam="kv_staging",
    summary="places, positions and lengths of a commit kept for the next draft, in one launch",
    requires=Requirements(
        isas=TRITON_ISAS,
        declines=frozenset({"ragged_verify", "dp_attention", "pipeline_parallel"}),
    ),
    needs=frozenset({"deferred_kv"}),
    numerics=Numerics(kind=NumericsKind.BITWISE, because="integers only"),
    implementation=f"{_HERE}.launch:KvStaging",
    reference=f"{_HERE}.reference:kv_staging",
    cases=f"{_HERE}.cases:cases",
)
