"""What `deferred_kv` states about itself."""

from sgl_mega_plugin.contract import Requirements, Slot, Stage
from sgl_mega_slots.commit.context_kv.spec import CONTEXT_KV

_HERE = "sgl_mega_slots.commit.deferred_kv"

DEFERRED_KV = Slot(
    name="deferred_kv",
    stage=Stage.COMMIT,
    seam="staged_kv",
    summary="a staged commit's context KV, written at the head of the next draft and disarmed, in one launch",
    requires=Requirements(
        isas=CONTEXT_KV.requires.isas,
        dtypes=CONTEXT_KV.requires.dtypes,
        declines=CONTEXT_KV.requires.declines,
    ),
    needs=frozenset({"kv_staging"}),
    numerics=CONTEXT_KV.numerics,
    implementation=f"{_HERE}.launch:DeferredKv",
    reference=f"{_HERE}.reference:staged_kv",
    cases=f"{_HERE}.cases:cases",
)
