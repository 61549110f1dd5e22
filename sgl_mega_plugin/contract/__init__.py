"""The contract between slots and whatever runs them. Imports neither torch nor an engine."""

from sgl_mega_plugin.contract.cases import Case
from sgl_mega_plugin.contract.decision import Active, Feature, Host, Inactive, Plan, Provided
from sgl_mega_plugin.contract.errors import SlotError
from sgl_mega_plugin.contract.seams import (
    PADDING_SLOT,
    SEAMS,
    ContextKv,
    DraftBlock,
    GreedyAccept,
    SampledAccept,
    Seam,
    StepInputs,
)
from sgl_mega_plugin.contract.slot import Backend, Numerics, NumericsKind, Record, Requirements, Slot, SlotSetup
from sgl_mega_plugin.contract.stage import Stage

__all__ = [
    "PADDING_SLOT",
    "SEAMS",
    "Active",
    "Backend",
    "Case",
    "ContextKv",
    "DraftBlock",
    "Feature",
    "GreedyAccept",
    "Host",
    "Inactive",
    "Numerics",
    "NumericsKind",
    "Plan",
    "Provided",
    "Record",
    "Requirements",
    "SampledAccept",
    "Seam",
    "Slot",
    "SlotError",
    "SlotSetup",
    "Stage",
    "StepInputs",
]
