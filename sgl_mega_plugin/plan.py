"""The plan: registry + slot list + switches + host -> which slots run here, and why not the others.

Pure: reads an environment, changes nothing, imports no kernel. The CLI, the engine binding and
the embedded engine all take their plan from :func:`make_plan`; the engine binding also writes
:func:`engine_environment` into the environment.

What decides for a slot with a kernel is the slot list alone. For an engine-backed slot, from strong
to weak: a value of its variable that the user set; a removal in the list; its name, ``all`` or
its ``@stage`` in the list; the master switch. So the sixteen are on under the master switch even
if the list does not mention them, and ``-post_fold`` or ``none`` turns them off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from sgl_mega_plugin.contract.decision import Active, Host, Inactive, Plan, Provided
from sgl_mega_plugin.contract.errors import ConflictError, MissingNeedError, quoted
from sgl_mega_plugin.contract.selection import Choice, apply, parse
from sgl_mega_plugin.contract.slot import Slot
from sgl_mega_plugin.contract.stage import Stage
from sgl_mega_plugin.registry import Registry
from sgl_mega_plugin.switch import (
    MASTER_SWITCH,
    MASTER_VARIABLES,
    SLOTS_VARIABLE,
    engine_reads,
    master_switch,
    user_value,
    variable_changes,
)

_STAGE_ORDER = {stage: position for position, stage in enumerate(Stage)}


@dataclass(frozen=True)
class _Wish:
    """What the user and the defaults want of one slot, before other slots are looked at."""

    provided: Provided
    wanted: bool
    because: str  # why it is wanted, or why not
    named: bool = False
    fixed: bool = False  # by the user's value of the engine variable
    removed: bool = False
    obstacles: tuple[str, ...] = ()  # of the host

    @property
    def slot(self) -> Slot:
        return self.provided.slot

    @property
    def insisted(self) -> bool:
        """The user asked for this one; a conflict with another such one is theirs to resolve."""
        return self.wanted and (self.named or self.fixed)


def make_plan(*, registry: Registry, environ: Mapping[str, str], host: Host) -> Plan:
    """Decide which slots run on a host.

    Active slots come in stage order, within a stage the ones the user named first. Raises
    :class:`SelectionError` and :class:`SwitchError` for values that cannot be read, and
    :class:`ConflictError` and :class:`MissingNeedError` for slots asked for by name that
    exclude each other or lack another. A named slot that cannot run here is in ``refusals()``.
    """
    choice = apply(parse(environ.get(SLOTS_VARIABLE)), registry.slots())
    mastered = MASTER_VARIABLES if master_switch(environ) else ()
    wishes = {
        entry.slot.name: _wish(entry, choice, environ=environ, mastered=mastered, host=host)
        for entry in registry.provided
    }
    _check_names(wishes)
    lost = _left_out(wishes)
    running = [wish for wish in wishes.values() if wish.wanted and not wish.obstacles and wish.slot.name not in lost]
    running.sort(key=lambda wish: (_STAGE_ORDER[wish.slot.stage], not wish.named))
    active = {
        wish.slot.name: Active(provided=wish.provided, named=wish.named, because=wish.because) for wish in running
    }
    inactive = tuple(
        Inactive(provided=wish.provided, named=wish.named, reasons=_reasons(wish, lost.get(name)))
        for name, wish in wishes.items()
        if name not in active
    )
    variables = _engine_variables(wishes, active, host)
    return Plan(host=host, active=tuple(active.values()), inactive=inactive, engine_variables=variables)


def engine_environment(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """The changes that make the engine's switches do what the plan says; empty if they do already.

    The caller updates the environment with them before the engine reads it; child processes
    inherit them. Variables that the user set are never among them.
    """
    return variable_changes(environ, plan.engine_variables)


def host_obstacles(slot: Slot, host: Host) -> list[str]:
    """Why a slot cannot run on a host; empty if it can. What is not known of a host is no obstacle."""
    requires = slot.requires
    if slot.engine_backed and host.runtime != "sglang":
        return [f"the engine's own code does its work, and runtime {host.runtime!r} has no engine"]
    found = []
    if slot.seam is not None and slot.seam in host.closed_seams:
        found.append(host.closed_seams[slot.seam])
    if requires.isas and host.isa not in requires.isas:
        seen = f"this machine is {host.isa!r}" if host.isa else "no GPU is visible"
        found.append(f"needs ISA {_one_of(requires.isas)}; {seen}")
    if requires.dtypes and host.dtype is not None and host.dtype not in requires.dtypes:
        found.append(f"needs dtype {_one_of(requires.dtypes)}; the model has {host.dtype!r}")
    if requires.engine_versions and host.runtime == "sglang" and host.engine_version not in requires.engine_versions:
        found.append(f"needs SGLang {_one_of(requires.engine_versions)}; this is {host.engine_version or 'unknown'!r}")
    if requires.model_types and host.model_type is not None and host.model_type not in requires.model_types:
        found.append(f"needs model type {_one_of(requires.model_types)}; this is {host.model_type!r}")
    runs_all = slot.seam not in host.shared_seams
    if runs_all and requires.max_batch is not None and (host.max_batch or 0) > requires.max_batch:
        found.append(f"serves at most {requires.max_batch} requests a step; the server allows {host.max_batch}")
    for name in sorted(feature.value for feature in host.features if feature.value in requires.declines):
        found.append(f"declines feature {name!r}, which this server uses")
    return found


def _wish(
    entry: Provided, choice: Choice, *, environ: Mapping[str, str], mastered: tuple[str, ...], host: Host
) -> _Wish:
    slot = entry.slot
    wanted, named, removed = slot.name in choice.names, slot.name in choice.named, slot.name in choice.removed
    text = environ.get(SLOTS_VARIABLE, "").strip()
    fixed = False
    if named:
        because = f"named in {SLOTS_VARIABLE}"
    elif wanted:
        because = "in the default set" if slot.default else f"brought by {SLOTS_VARIABLE}={text!r}"
    elif removed:
        because = f"switched off by {SLOTS_VARIABLE}={text!r}"
    elif text:
        because = f"not in the list {SLOTS_VARIABLE}={text!r}"
    else:
        because = f"not in the default set; {SLOTS_VARIABLE}='default,{slot.name}' turns it on"
    variable = slot.engine_switch if slot.engine_backed else None
    if variable is not None:
        if not wanted and not removed and variable in mastered:
            wanted, because = True, f"turned on by {MASTER_SWITCH}"
        value = user_value(environ, variable)
        if value is not None:
            fixed, wanted = True, bool(engine_reads(value))
            because = _fixed_because(variable, value, removed=removed)
    return _Wish(
        provided=entry,
        wanted=wanted,
        because=because,
        named=named,
        fixed=fixed,
        removed=removed,
        obstacles=tuple(host_obstacles(slot, host)),
    )


def _fixed_because(variable: str, value: str, *, removed: bool) -> str:
    reads = engine_reads(value)
    if reads is None:
        return f"{variable}={value!r} is no switch value to the engine, which reads it as off: write '1' or '0'"
    if reads:
        return f"{variable}={value!r} in the environment" + (" wins over its removal in the list" if removed else "")
    return f"{variable}={value!r} in the environment switches it off; unset the variable to let the list decide"


def _check_names(wishes: Mapping[str, _Wish]) -> None:
    """Raise for what the user asked for and cannot have together, whatever the host."""
    insisted = [wish for wish in wishes.values() if wish.insisted and (wish.named or not wish.obstacles)]
    for first, second in combinations(insisted, 2):
        if _conflict(first.slot, second.slot) and (first.named or second.named):
            raise ConflictError(
                f"slots {first.slot.name!r} ({first.because}) and {second.slot.name!r} ({second.because}) "
                f"exclude each other: keep one of them"
            )
    for wish in insisted:
        for need in sorted(wish.slot.needs) if wish.named else ():
            if not wishes[need].wanted:
                raise MissingNeedError(
                    f"slot {wish.slot.name!r} (named in {SLOTS_VARIABLE}) needs slot {need!r}, which is off: "
                    f"{wishes[need].because}. Add {need!r} or leave {wish.slot.name!r} out"
                )


def _left_out(wishes: Mapping[str, _Wish]) -> dict[str, str]:
    """Wanted slots that can run alone and give way to others, each with the reason.

    What the user asked for stays, then what that needs; among the rest the earlier slot does. A slot
    that is left out takes along what needs it, so this repeats until nothing changes.
    """
    lost: dict[str, str] = {}
    needed = _needed(wishes)
    candidates = [wish for wish in wishes.values() if wish.wanted and not wish.obstacles]
    candidates.sort(key=lambda wish: (not wish.insisted, wish.slot.name not in needed))
    while True:
        reason = next(_losses(candidates, lambda name: name in lost), None)
        if reason is None:
            return lost
        lost[reason[0]] = reason[1]


def _needed(wishes: Mapping[str, _Wish]) -> set[str]:
    """What the slots that the user asked for need, directly or through others."""
    found: set[str] = set()
    open_ends = [wish.slot for wish in wishes.values() if wish.insisted]
    while open_ends:
        new = open_ends.pop().needs - found
        found |= new
        open_ends += [wishes[name].slot for name in new]
    return found


def _losses(candidates: list[_Wish], is_lost: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """What the candidates that remain cannot keep: broken needs first, then conflicts."""
    left = [wish for wish in candidates if not is_lost(wish.slot.name)]
    names = {wish.slot.name for wish in left}
    for wish in left:
        missing = sorted(wish.slot.needs - names)
        # The engine does what a variable says, whether or not that has an effect.
        if missing and not wish.fixed:
            yield wish.slot.name, f"needs {quoted(missing)}, which does not run here"
    for first, second in combinations(left, 2):
        if _conflict(first.slot, second.slot) and not second.fixed:
            yield second.slot.name, f"excluded by slot {first.slot.name!r}, which runs here"


def _engine_variables(wishes: Mapping[str, _Wish], active: Mapping[str, Active], host: Host) -> dict[str, str]:
    """Values for the engine's switches, where the user set none."""
    values: dict[str, str] = {}
    for name, wish in wishes.items():
        variable = wish.slot.engine_switch
        if host.runtime != "sglang" or not wish.slot.engine_backed or wish.fixed or variable is None:
            continue
        if name in active:
            values[variable] = "1"
        elif wish.removed or (wish.wanted and not wish.obstacles):
            values[variable] = "0"
    return values


def _reasons(wish: _Wish, lost: str | None) -> tuple[str, ...]:
    """Every reason against an inactive slot, the user's own decision first."""
    mine = () if wish.wanted else (wish.because,)
    return (*mine, *wish.obstacles, *((lost,) if lost else ()))


def _conflict(first: Slot, second: Slot) -> bool:
    return second.name in first.conflicts or first.name in second.conflicts


def _one_of(names: frozenset[str]) -> str:
    return " or ".join(sorted(names))
