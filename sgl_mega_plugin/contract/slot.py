"""What a slot states about itself. Metadata only: the kernel behind it is imported by a plan."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    field_serializer,
    model_validator,
)

from sgl_mega_plugin.contract.seams import SEAMS
from sgl_mega_plugin.contract.stage import Stage

SlotName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
ObjectPath = Annotated[str, StringConstraints(pattern=r"^[\w.]+:[A-Za-z_]\w*$")]
#: What a slot list says beside names and stages; no slot may be called so.
LIST_WORDS = frozenset({"all", "default", "none"})


class Record(BaseModel):
    """A frozen record that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_serializer("*", mode="wrap", when_used="json")
    def _sets_in_order(self, value: Any, handler: SerializerFunctionWrapHandler) -> Any:
        """Sets are sorted in JSON, so that two processes write the same text."""
        written = handler(value)
        return sorted(written) if isinstance(value, frozenset) else written


class Backend(StrEnum):
    """What runs a slot's arithmetic."""

    KERNEL = "kernel"  # the GPU kernel
    INTERPRETER = "interpreter"  # the same Triton source, on the CPU
    REFERENCE = "reference"  # plain torch


class NumericsKind(StrEnum):
    BITWISE = "bitwise"
    IN_LAW = "in_law"
    TOLERANCE = "tolerance"


class Numerics(Record):
    """How far a slot's result may be from its reference, and why that far."""

    kind: NumericsKind
    bound: float = 0.0  # largest relative error; 0 unless kind is tolerance
    because: str = ""  # where the bound comes from

    @model_validator(mode="after")
    def _bound_has_a_source(self) -> Self:
        if (self.kind is NumericsKind.TOLERANCE) != (self.bound > 0):
            raise ValueError(f"a bound goes with kind 'tolerance' only: kind {self.kind.value!r}, bound {self.bound}")
        if self.bound and not self.because:
            raise ValueError("a tolerance states its derivation in 'because'")
        return self


class Requirements(Record):
    """Where a slot can run. An empty set accepts anything."""

    isas: frozenset[str] = frozenset()  # "sm_90"; a CPU is "cpu"
    dtypes: frozenset[str] = frozenset()  # of the model: "bfloat16"
    engine_versions: frozenset[str] = frozenset()  # SGLang releases; needed by engine-backed slots
    model_types: frozenset[str] = frozenset()  # HF model_type of the target
    max_batch: int | None = None  # largest B
    declines: frozenset[str] = frozenset()  # features it won't serve, see contract.decision


class Slot(Record):
    """One replaceable piece of a decode step.

    ``implementation`` is a class: built once with a :class:`SlotSetup`, then called with the
    seam's arguments. ``reference`` is a function with the same arguments, in plain torch.
    ``cases`` is a function that yields the conformance cases. An engine-backed slot has none
    of them: its implementation is the engine's own switch, ``engine_switch``.
    """

    name: SlotName
    stage: Stage
    summary: Annotated[str, StringConstraints(min_length=1, max_length=120, pattern=r"^[^\n]+$")]
    default: bool = False
    seam: str | None = None
    requires: Requirements = Requirements()
    needs: frozenset[SlotName] = frozenset()
    conflicts: frozenset[SlotName] = frozenset()
    engine_switch: str | None = Field(default=None, pattern=r"^SGLANG_[A-Z0-9_]+$")
    numerics: Numerics = Numerics(kind=NumericsKind.BITWISE)
    implementation: ObjectPath | None = None
    reference: ObjectPath | None = None
    cases: ObjectPath | None = None

    @property
    def engine_backed(self) -> bool:
        """Whether the engine's own code does the work."""
        return self.implementation is None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.name in LIST_WORDS:
            raise ValueError(f"slot name {self.name!r} is a word of the slot list")
        if self.name in self.needs | self.conflicts:
            raise ValueError(f"slot {self.name!r} needs or conflicts with itself")
        if self.engine_backed:
            if self.engine_switch is None:
                raise ValueError(f"slot {self.name!r} has neither an implementation nor an engine switch")
            if self.seam or self.reference or self.cases:
                raise ValueError(f"engine-backed slot {self.name!r} names a seam, a reference or cases")
            return self
        if self.seam not in SEAMS:
            raise ValueError(f"slot {self.name!r}: seam {self.seam!r} is none of {sorted(SEAMS)}")
        if SEAMS[self.seam].stage is not self.stage:
            raise ValueError(
                f"slot {self.name!r}: seam {self.seam!r} belongs to stage "
                f"{SEAMS[self.seam].stage.value!r}, not {self.stage.value!r}"
            )
        if not (self.reference and self.cases):
            raise ValueError(f"slot {self.name!r} has a kernel but lacks a reference or cases")
        return self


class SlotSetup(Record):
    """What a slot's implementation is built with: sizes fixed for the life of a server."""

    backend: Backend
    device: str  # "cuda:0", "cpu"
    max_batch: int = Field(ge=1)
    gamma: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
