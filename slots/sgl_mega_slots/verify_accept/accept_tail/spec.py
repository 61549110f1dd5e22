"""What `accept_tail` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.verify_accept.accept_tail"

ACCEPT_TAIL = Slot(
    name="accept_tail",
    stage=Stage.VERIFY_ACCEPT,
    seam="greedy_accept",
    summary="greedy accept of the block and all its bookkeeping in one launch or two, from logits or their argmax",
    default=True,
    requires=Requirements(
        isas=TRITON_ISAS,
        declines=frozenset(
            {"grammar", "logit_adjustments", "logprobs", "ragged_verify", "dp_attention", "pipeline_parallel"}
        ),
    ),
    numerics=Numerics(kind=NumericsKind.BITWISE, because="comparisons and integers only"),
    implementation=f"{_HERE}.launch:AcceptTail",
    reference=f"{_HERE}.reference:greedy_accept",
    cases=f"{_HERE}.cases:cases",
)
