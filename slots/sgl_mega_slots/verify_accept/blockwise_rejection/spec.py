"""What `blockwise_rejection` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.verify_accept.blockwise_rejection"

BLOCKWISE_REJECTION = Slot(
    name="blockwise_rejection",
    stage=Stage.VERIFY_ACCEPT,
    seam="sampled_accept",
    summary="sampled accept of a mixed batch in two launches or three, no probability tensor written",
    default=True,
    requires=Requirements(
        isas=TRITON_ISAS,
        declines=frozenset(
            {"grammar", "logit_adjustments", "logprobs", "ragged_verify", "dp_attention", "pipeline_parallel"}
        ),
    ),
    numerics=Numerics(
        kind=NumericsKind.IN_LAW,
        because=(
            "log-probabilities in fp32 are within 2**-16 of the larger of 1 and their size, for V to 2**20: a term "
            "below the top rounds by some 2**-22 of its distance, on average at most 20; equal to the fp64 "
            "reference wherever no coin is that close to p / q and the drawn id leads by more"
        ),
    ),
    implementation=f"{_HERE}.launch:BlockwiseRejection",
    reference=f"{_HERE}.reference:sampled_accept",
    cases=f"{_HERE}.cases:cases",
)
