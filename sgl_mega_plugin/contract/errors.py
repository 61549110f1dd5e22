"""Errors about slots, each with the subject, the value seen, what is allowed and what to do.

Raised by the selection, the registry, the switches and the plan; the CLI turns any
:class:`SlotError` into exit code 2 and the engine binding into a reason not to start.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SlotError(Exception):
    """Anything about slots that a user or a slot's author has to put right."""


class SelectionError(SlotError):
    """A slot list that cannot be read."""


class UnknownSlotError(SelectionError):
    """A name that no installed distribution provides."""


class UpstreamSlotError(UnknownSlotError):
    """A name of NVIDIA's DeepSeek-V4.1 kernel set that nothing installed provides."""


class SwitchError(SlotError):
    """A variable whose value is no spelling of on or off."""


class RegistryError(SlotError):
    """Slots that do not fit together, or a distribution that provides them wrongly."""


class EntryPointError(RegistryError):
    """An entry point that fails, or is no sequence of slots."""


class DuplicateSlotError(RegistryError):
    """One slot name, registered twice with different contents or by two distributions."""


class ImplementationError(RegistryError):
    """A path of a slot that cannot be imported or does not fit its seam."""


class PlanError(SlotError):
    """Slots that the user asked for and that cannot be together."""


class ConflictError(PlanError):
    """Two slots asked for by name that exclude each other."""


class MissingNeedError(PlanError):
    """A slot asked for by name without another that it needs."""


def quoted(values: Iterable[str]) -> str:
    """Values in quotes, separated by commas; ``none`` where there are none."""
    return ", ".join(repr(value) for value in values) or "none"


def near_misses(value: str, known: Iterable[str]) -> list[str]:
    """Up to three known names close to a value, closest first, whatever the case."""
    by_lower = {name.lower(): name for name in known}
    return [by_lower[match] for match in difflib.get_close_matches(value.lower(), by_lower, n=3, cutoff=0.6)]


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """``"Did you mean 'a' or 'b'? "`` for near misses, or nothing."""
    close = near_misses(value, known)
    return f"Did you mean {' or '.join(repr(name) for name in close)}? " if close else ""
