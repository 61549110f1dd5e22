"""The contract between slots and whatever runs them. Imports neither torch nor an engine."""

from sgl_mega_plugin.contract.cases import Case
from sgl_mega_plugin.contract.decision import Active, Feature, Host, Inactive, Plan, Provided
from sgl_mega_plugin.contract.errors import SlotError
from sgl_mega_plugin.contract.seams import (
    PADDING_SLOT,
    SEAMS,
    AttentionMetadata,
    ContextKv,
    DraftBlock,
    DraftLogits,
    GreedyAccept,
    HistoryCommit,
    KvStaging,
    Relay,
    SampledAccept,
    SamplingCutoffs,
    Seam,
    StagedKv,
    StepInputs,
    StepParams,
    TargetArgmax,
    TargetForward,
)
from sgl_mega_plugin.contract.slot import Backend, Numerics, NumericsKind, Record, Requirements, Slot, SlotSetup
from sgl_mega_plugin.contract.stage import Stage

__all__ = [
    "PADDING_SLOT",
    "SEAMS",
    "Active",
    "AttentionMetadata",
    "Backend",
    "Case",
    "ContextKv",
    "DraftBlock",
    "DraftLogits",
    "Feature",
    "GreedyAccept",
    "HistoryCommit",
    "Host",
    "Inactive",
    "KvStaging",
    "Numerics",
    "NumericsKind",
    "Plan",
    "Provided",
    "Record",
    "Relay",
    "Requirements",
    "SampledAccept",
    "SamplingCutoffs",
    "Seam",
    "Slot",
    "SlotError",
    "SlotSetup",
    "Stage",
    "StagedKv",
    "StepInputs",
    "StepParams",
    "TargetArgmax",
    "TargetForward",
]
