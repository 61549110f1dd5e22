"""Six slots that are wrong, each in one way, made of the sample's: the conformance kit has to catch every one."""

from sample_slots.spec import SCAN_ACCEPT
from sgl_mega_plugin.contract import Slot, Stage


def _accept(name: str, summary: str, implementation: str) -> Slot:
    path = f"broken_slots.accepts:{implementation}"
    return SCAN_ACCEPT.model_copy(update={"name": name, "summary": summary, "implementation": path})


SLOTS = (
    Slot(
        name="wrong_law",
        stage=Stage.DRAFT,
        seam="draft_block",
        summary="reference and implementation both forget the temperature",
        implementation="broken_slots.wrong_law:WrongLaw",
        reference="broken_slots.wrong_law:draft_block",
        cases="broken_slots.wrong_law:cases",
    ),
    _accept("stale_replay", "copies the verify lengths once an address", "StaleReplay"),
    _accept("padded_write", "commits a token in a padded row", "PaddedWrite"),
    _accept("id_out_of_range", "gives the last tile's padding as an id", "IdOutOfRange"),
    _accept("host_read", "asks the device how many rows are live", "HostRead"),
    _accept("wrong_signature", "takes an argument by another name", "WrongSignature"),
)
