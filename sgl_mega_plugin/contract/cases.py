"""Conformance cases: named inputs of a seam, made by a slot and run by the kit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One set of arguments of a seam.

    ``make(device)`` returns every keyword argument of the seam on that device. The kit poisons
    a copy of each ``out_*`` argument before a run unless ``keep`` names it (an output that
    must survive where the slot may not write); it runs kernel and reference on equal copies.
    ``exact`` compares bit for bit even where the slot's numerics allow a tolerance.
    """

    id: str
    make: Callable[[str], dict[str, Any]]
    keep: frozenset[str] = field(default_factory=frozenset)
    kernel_only: bool = False  # too large for the interpreter
    exact: bool = False
