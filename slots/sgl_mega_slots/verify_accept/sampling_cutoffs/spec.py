"""What `sampling_cutoffs` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage
from sgl_mega_slots.common.isas import TRITON_ISAS

_HERE = "sgl_mega_slots.verify_accept.sampling_cutoffs"

SAMPLING_CUTOFFS = Slot(
    name="sampling_cutoffs",
    stage=Stage.VERIFY_ACCEPT,
    seam="sampling_cutoffs",
    summary="top-k, top-p and min-p of every target row as its smallest logit with mass, in two launches",
    default=True,
    requires=Requirements(isas=TRITON_ISAS, declines=frozenset({"dp_attention", "pipeline_parallel"})),
    numerics=Numerics(
        kind=NumericsKind.IN_LAW,
        because=(
            "a cutoff is a logit of its row, found by comparisons; masses are powers of two in fp32, each within "
            "2**-20, summed in blocks, so a sum is within 2**-16 of the fp64 reference's: only a top_p or min_p that "
            "close to where a row's answer changes can be decided otherwise"
        ),
    ),
    implementation=f"{_HERE}.launch:SamplingCutoffs",
    reference=f"{_HERE}.reference:sampling_cutoffs",
    cases=f"{_HERE}.cases:cases",
)
