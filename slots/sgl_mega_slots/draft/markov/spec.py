"""What `markov` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.draft.markov"

MARKOV = Slot(
    name="markov",
    stage=Stage.DRAFT,
    seam="draft_block",
    summary="all Markov steps of the draft block in one launch; gated and RNN heads in two launches a token",
    default=True,
    requires=Requirements(
        isas=TRITON_ISAS,
        declines=frozenset({"grammar", "tensor_parallel", "dp_attention", "pipeline_parallel"}),
    ),
    numerics=Numerics(
        kind=NumericsKind.TOLERANCE,
        bound=2.0**-6,
        because=(
            "step logits: another fp32 order of the R products may flip the rounding of the bias and then of the sum, "
            "2**-7 of a logit each in bf16, and so with a mixer's sums; bitwise where every order is exact. Tokens: "
            "equal wherever the best score leads by more than 2**-16 of the larger of 1 and its size, for noise is "
            "within 2**-17"
        ),
    ),
    implementation=f"{_HERE}.launch:Markov",
    reference=f"{_HERE}.reference:draft_block",
    cases=f"{_HERE}.cases:cases",
)
