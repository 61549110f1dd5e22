"""The registry: every slot that installed distributions provide, and who provides each.

Distributions announce slots in the entry-point group ``sgl_mega_plugin.slots``; an entry point
is a sequence of :class:`Slot`. Reading them imports metadata only. What stands behind a slot is
imported, and its signature compared with the seam, by the ``load_*`` functions when a plan
uses it. Used by the plan's callers: the CLI, the engine binding and the embedded engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, Self

from importlib_metadata import EntryPoint, entry_points

from sgl_mega_plugin.contract.cases import Case
from sgl_mega_plugin.contract.decision import Feature, Provided
from sgl_mega_plugin.contract.errors import (
    DuplicateSlotError,
    EntryPointError,
    ImplementationError,
    RegistryError,
    did_you_mean,
    quoted,
)
from sgl_mega_plugin.contract.seams import SEAMS
from sgl_mega_plugin.contract.selection import unknown_slot
from sgl_mega_plugin.contract.slot import Slot
from sgl_mega_plugin.contract.stage import Stage

GROUP = "sgl_mega_plugin.slots"

_STAGE_ORDER = {stage: position for position, stage in enumerate(Stage)}


class Registry:
    """Slots by name, in stage order; within a stage kernels come before the engine's switches.

    Raises :class:`DuplicateSlotError` for one name with two meanings or two distributions, and
    :class:`RegistryError` for a need that no slot meets, a declined feature that does not exist, or
    an engine variable with two slots.
    """

    def __init__(self, provided: Iterable[Provided]) -> None:
        by_name: dict[str, Provided] = {}
        for entry in provided:
            known = by_name.setdefault(entry.slot.name, entry)
            if known != entry:
                raise _duplicate(known, entry)
        ordered = sorted(by_name.values(), key=lambda e: (_STAGE_ORDER[e.slot.stage], e.slot.engine_backed))
        self._by_name = {entry.slot.name: entry for entry in ordered}
        for entry in ordered:
            self._check(entry)
        self._check_variables()

    @classmethod
    def of(cls, provided: Iterable[Provided]) -> Self:
        """A registry of the slots given, for tests and for embedding."""
        return cls(provided)

    @classmethod
    def discover(cls) -> Self:
        """Every slot of every installed distribution, in order of distribution and entry point.

        Raises :class:`EntryPointError` for an entry point that fails or is no sequence of
        slots, and :class:`RegistryError` if there are none, as where this package was never installed.
        """
        entries = sorted(entry_points(group=GROUP), key=lambda entry: (_distribution(entry), entry.name))
        if not entries:
            raise RegistryError(
                f"no installed distribution has an entry point in group {GROUP!r}, this package's own included: "
                f"install sgl-mega-plugin, a source checkout with 'pip install -e .'"
            )
        return cls(provided for entry in entries for provided in _slots_of(entry))

    @property
    def provided(self) -> tuple[Provided, ...]:
        """Every slot with its distribution, in order."""
        return tuple(self._by_name.values())

    def slots(self) -> tuple[Slot, ...]:
        """Every slot, in order."""
        return tuple(entry.slot for entry in self._by_name.values())

    def get(self, name: str) -> Provided:
        """The slot of a name; raises :class:`UnknownSlotError` with near misses."""
        entry = self._by_name.get(name)
        if entry is None:
            raise unknown_slot(name, list(self._by_name), where="registry")
        return entry

    def _check_variables(self) -> None:
        by_variable: dict[str | None, Provided] = {}
        for entry in self._by_name.values():
            slot = entry.slot
            known = by_variable.setdefault(slot.engine_switch, entry) if slot.engine_backed else entry
            if known is not entry:
                raise RegistryError(
                    f"slots {known.slot.name!r} of {_who(known)} and {slot.name!r} of {_who(entry)} are both backed "
                    f"by {slot.engine_switch}: keep one of them"
                )

    def _check(self, entry: Provided) -> None:
        slot, names, features = entry.slot, list(self._by_name), [feature.value for feature in Feature]
        for need in sorted(slot.needs - self._by_name.keys()):
            raise RegistryError(
                f"slot {slot.name!r} of {_who(entry)} needs slot {need!r}, which no installed distribution "
                f"provides. {did_you_mean(need, names)}Slots here: {quoted(names)}."
            )
        for feature in sorted(slot.requires.declines.difference(features)):
            raise RegistryError(
                f"slot {slot.name!r} of {_who(entry)} declines feature {feature!r}, which is none. "
                f"{did_you_mean(feature, features)}Features: {quoted(features)}."
            )


def load_implementation(provided: Provided) -> type[Any]:
    """Import a slot's implementation: a class, built with a ``SlotSetup``, called as its seam.

    Raises :class:`ImplementationError` for a path that cannot be imported, with the cause, and for
    every way in which the class does not fit. An engine-backed slot has none and is an error too.
    """
    path = provided.slot.implementation
    found = _load(provided, "implementation", path)
    if not isinstance(found, type):
        raise _misfit(provided, "implementation", path, [f"is {_kind(found)}, not a class"])
    reasons = []
    try:
        inspect.signature(found).bind(None)
    except (TypeError, ValueError) as error:
        reasons.append(f"cannot be built with one argument, the setup: {error}")
    call = next((vars(base)["__call__"] for base in found.__mro__ if "__call__" in vars(base)), None)
    if call is None:
        reasons.append("has no __call__")
    else:
        reasons += _seam_mismatches(provided, call)
    if reasons:
        raise _misfit(provided, "implementation", path, reasons)
    return found


def load_reference(provided: Provided) -> Callable[..., None]:
    """Import a slot's reference: a function with its seam's arguments. Errors as above."""
    path = provided.slot.reference
    found = _load(provided, "reference", path)
    if not inspect.isfunction(found):
        raise _misfit(provided, "reference", path, [f"is {_kind(found)}, not a function"])
    reasons = _seam_mismatches(provided, found)
    if reasons:
        raise _misfit(provided, "reference", path, reasons)
    return found


def load_cases(provided: Provided) -> tuple[Case, ...]:
    """Import a slot's cases and list them: at least one, with unique ids. Errors as above."""
    path = provided.slot.cases
    found = _load(provided, "cases", path)
    if not callable(found):
        raise _misfit(provided, "cases", path, [f"is {_kind(found)}, not a function"])
    try:
        cases = tuple(found())
    except Exception as error:
        raise _misfit(provided, "cases", path, [f"fails with {type(error).__name__}: {error}"]) from error
    reasons = [f"yields {_kind(case)}, not a Case" for case in cases if not isinstance(case, Case)]
    if not reasons:
        ids = [case.id for case in cases]
        reasons = [f"yields case id {name!r} twice" for name in sorted({name for name in ids if ids.count(name) > 1})]
    if reasons or not cases:
        raise _misfit(provided, "cases", path, reasons or ["yields no case"])
    return cases


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown distribution"


def _slots_of(entry: EntryPoint) -> list[Provided]:
    """The slots of one entry point, with its distribution."""
    name = _distribution(entry)
    version = entry.dist.version if entry.dist is not None else "unknown"
    where = f"entry point {entry.name!r} = {entry.value!r} of {name} {version}"
    try:
        found = entry.load()
    except Exception as error:
        raise EntryPointError(
            f"{where} cannot be loaded: {type(error).__name__}: {error}. Repair or uninstall {name}."
        ) from error
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise EntryPointError(
            f"{where} is {_kind(found)}; it has to be a sequence of Slot. Repair or uninstall {name}."
        )
    for position, slot in enumerate(found):
        if not isinstance(slot, Slot):
            raise EntryPointError(
                f"{where} holds {_kind(slot)} at index {position}; every item has to be a Slot. "
                f"Repair or uninstall {name}."
            )
    return [Provided(slot=slot, distribution=name, version=version) for slot in found]


def _duplicate(first: Provided, second: Provided) -> DuplicateSlotError:
    if _who(first) != _who(second):
        return DuplicateSlotError(
            f"slot {first.slot.name!r} is provided by {_who(first)} and by {_who(second)}: uninstall one of them"
        )
    return DuplicateSlotError(
        f"slot {first.slot.name!r} is registered twice, differently, by {_who(first)}: it has to be one record"
    )


def _load(provided: Provided, role: str, path: str | None) -> Any:
    if path is None:
        raise ImplementationError(
            f"slot {provided.slot.name!r} of {_who(provided)} has no {role}: the engine's own code does its work, "
            f"switched by {provided.slot.engine_switch}"
        )
    module, _, attribute = path.partition(":")
    try:
        loaded = import_module(module)
    except Exception as error:
        raise _misfit(provided, role, path, [f"cannot be imported: {type(error).__name__}: {error}"]) from error
    if not hasattr(loaded, attribute):
        hint = did_you_mean(attribute, vars(loaded)).strip()
        raise _misfit(provided, role, path, [f"module {module!r} has no {attribute!r}. {hint}".strip()])
    return getattr(loaded, attribute)


def _seam_mismatches(provided: Provided, call: Callable[..., Any]) -> list[str]:
    seam = SEAMS[provided.slot.seam or ""]
    return [f"{reason} (seam {seam.name!r})" for reason in seam.mismatches(call)]


def _misfit(provided: Provided, role: str, path: str | None, reasons: list[str]) -> ImplementationError:
    return ImplementationError(
        f"slot {provided.slot.name!r} of {_who(provided)}: {role} {path!r} " + "; ".join(reasons)
    )


def _who(entry: Provided) -> str:
    return f"{entry.distribution} {entry.version}"


def _kind(value: object) -> str:
    return f"the class {value.__name__!r}" if isinstance(value, type) else f"of type {type(value).__name__!r}"
