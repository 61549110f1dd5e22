"""What `scan_accept` states about itself."""

from sgl_mega_plugin.contract import Numerics, NumericsKind, Requirements, Slot, Stage

SCAN_ACCEPT = Slot(
    name="scan_accept",
    stage=Stage.VERIFY_ACCEPT,
    seam="greedy_accept",
    summary="greedy accept in one launch, a program a request",
    requires=Requirements(
        isas=frozenset({"sm_90", "sm_100", "cpu"}),
        declines=frozenset({"grammar", "logit_adjustments", "logprobs", "ragged_verify"}),
    ),
    numerics=Numerics(kind=NumericsKind.BITWISE, because="comparisons and integers only"),
    implementation="sample_slots.launch:ScanAccept",
    reference="sample_slots.reference:greedy_accept",
    cases="sample_slots.cases:cases",
)
