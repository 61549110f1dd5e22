"""What a plan decides: which slots run here, and why each of the others does not."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from sgl_mega_plugin.contract.slot import Backend, Record, Slot
from sgl_mega_plugin.contract.stage import Stage


class Feature(StrEnum):
    """What a batch or a server may ask for that a slot can decline."""

    GRAMMAR = "grammar"
    LOGIT_ADJUSTMENTS = "logit_adjustments"
    TOP_K = "top_k"
    TOP_P = "top_p"
    MIN_P = "min_p"
    LOGPROBS = "logprobs"
    RAGGED_VERIFY = "ragged_verify"
    DP_ATTENTION = "dp_attention"
    PIPELINE_PARALLEL = "pipeline_parallel"
    TENSOR_PARALLEL = "tensor_parallel"
    LORA = "lora"


class Host(Record):
    """Where a plan is to run."""

    runtime: Literal["sglang", "embedded", "none"]
    isa: str | None  # "sm_90", "cpu", or None where nothing is visible
    backend: Backend
    dtype: str | None = None
    model_type: str | None = None
    engine_version: str | None = None
    max_batch: int | None = None
    features: frozenset[Feature] = frozenset()  # in use on the whole server
    closed_seams: dict[str, str] = Field(
        default_factory=dict
    )  # seams that this runtime calls no slot at, with the reason
    shared_seams: frozenset[str] = frozenset()  # where a slot runs batches up to its largest, the runtime larger ones


class Provided(Record):
    """A slot and the distribution that provides it."""

    slot: Slot
    distribution: str
    version: str


class Active(Record):
    """A slot that runs."""

    provided: Provided
    named: bool  # by the user's list, rather than a default
    because: str = ""  # what turned it on

    @property
    def name(self) -> str:
        return self.provided.slot.name


class Inactive(Record):
    """A slot that does not run, with every reason."""

    provided: Provided
    reasons: tuple[str, ...]
    named: bool  # a named slot that cannot run stops the server

    @property
    def name(self) -> str:
        return self.provided.slot.name


class Plan(Record):
    """Active slots in stage order, and for every other known slot its reasons."""

    host: Host
    active: tuple[Active, ...]
    inactive: tuple[Inactive, ...]
    engine_variables: dict[str, str] = Field(
        default_factory=dict
    )  # for the engine's switches, none of them set by the user

    def refusals(self) -> list[str]:
        """One line for each named slot that cannot run here; empty when the plan stands."""
        return [f"slot {entry.name!r}: {reason}" for entry in self.inactive if entry.named for reason in entry.reasons]

    def serving(self, seam: str) -> tuple[Active, ...]:
        """The active slots of a seam, preferred first."""
        return tuple(entry for entry in self.active if entry.provided.slot.seam == seam)

    def in_stage(self, stage: Stage) -> tuple[Active, ...]:
        return tuple(entry for entry in self.active if entry.provided.slot.stage is stage)
