"""Results of a conformance run, as data: one record a case, a slot and a run. Imports no torch."""

from __future__ import annotations

from pydantic import computed_field

from sgl_mega_plugin.contract import Backend, Record


class CaseResult(Record):
    """One case of a slot: whether it passed, and every difference if it did not."""

    slot: str
    case: str
    ok: bool
    detail: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One line for people."""
        return f"{self.slot}/{self.case}: " + ("passed" if self.ok else "; ".join(self.detail))


class SlotResult(Record):
    """A slot's cases on one device and backend."""

    slot: str
    distribution: str
    cases: tuple[CaseResult, ...]
    skipped: tuple[str, ...] = ()  # cases too large for the interpreter
    not_run: tuple[str, ...] = ()  # cases whose turn did not come before the time limit

    @computed_field  # type: ignore[prop-decorator]
    @property
    def run(self) -> int:
        return len(self.cases)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> int:
        return sum(case.ok for case in self.cases)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def failures(self) -> tuple[CaseResult, ...]:
        return tuple(case for case in self.cases if not case.ok)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        """Whether at least one case ran, none failed and none is missing."""
        return bool(self.cases) and not self.failures and not self.not_run


class Report(Record):
    """A whole run."""

    device: str
    device_name: str
    backend: Backend
    torch: str
    triton: str | None
    generated: int = 0  # cases a slot, from this seed
    seed: int = 0
    slots: tuple[SlotResult, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        return bool(self.slots) and all(slot.ok for slot in self.slots)
