"""What `draft_step` states about itself."""

from sgl_mega_plugin.contract import Slot, Stage
from sgl_mega_slots.target.target_step.spec import TARGET_STEP

_HERE = "sgl_mega_slots.draft.draft_step"

DRAFT_STEP = Slot(
    name="draft_step",
    stage=Stage.DRAFT,
    seam="draft_forward",
    summary="a dense draft's layers over its block as one persistent kernel, that of target_step; up to 32 rows",
    default=False,
    requires=TARGET_STEP.requires,
    numerics=TARGET_STEP.numerics,
    implementation=f"{_HERE}.launch:DraftStep",
    reference=f"{_HERE}.reference:draft_forward",
    cases=f"{_HERE}.cases:cases",
)
