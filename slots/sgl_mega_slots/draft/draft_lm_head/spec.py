"""What `draft_lm_head` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.draft.draft_lm_head"

DRAFT_LM_HEAD = Slot(
    name="draft_lm_head",
    stage=Stage.DRAFT,
    seam="draft_logits",
    summary="base logits of the draft block in one launch, or their argmax in two without logits",
    default=False,
    requires=Requirements(
        isas=TRITON_ISAS,
        declines=frozenset({"tensor_parallel", "dp_attention", "pipeline_parallel"}),
    ),
    numerics=Numerics(
        kind=NumericsKind.TOLERANCE,
        bound=2.0**-7,
        because=(
            "another fp32 order of the H products may flip the rounding of a logit: 2**-7 of it in bf16, less in fp16 "
            "and fp32; bitwise where every order is exact. It changes what is drafted at a near tie, never what the "
            "target accepts. Tokens: equal wherever the best logit leads by more than that"
        ),
    ),
    implementation=f"{_HERE}.launch:DraftLmHead",
    reference=f"{_HERE}.reference:draft_logits",
    cases=f"{_HERE}.cases:cases",
)
