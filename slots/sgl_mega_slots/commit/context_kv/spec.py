"""What `context_kv` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.commit.context_kv"

CONTEXT_KV = Slot(
    name="context_kv",
    stage=Stage.COMMIT,
    seam="context_kv",
    summary="norm, RoPE and gated KV write of the accepted rows, bf16 or fp8, every layer in one launch",
    default=True,
    requires=Requirements(
        isas=TRITON_ISAS,
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        declines=frozenset({"ragged_verify", "dp_attention", "pipeline_parallel"}),
    ),
    numerics=Numerics(
        kind=NumericsKind.BITWISE,
        because=(
            "the scale is computed in fp64, where the order of the sum moves it by less than 2**-45 of it and so its "
            "fp32 value in less than one row of 2**20; later operations round one by one, without fused multiply-add"
        ),
    ),
    implementation=f"{_HERE}.launch:ContextKv",
    reference=f"{_HERE}.reference:context_kv",
    cases=f"{_HERE}.cases:cases",
)
