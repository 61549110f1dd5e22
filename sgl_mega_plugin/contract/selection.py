"""The slot list, ``SGLANG_NVIDIA_MEGAKERNEL_SLOTS``: a small language that says which slots a user wants.

    list   = [term] {"," [term]}
    term   = ["-"] (slot name | "@" stage | "default" | "all") | "none"

Terms apply from left to right; a leading ``-`` removes. ``default`` is every slot whose own
``default`` is true, ``all`` every known slot, the engine's switches included, ``@stage``
all of one stage, ``none`` the same as ``-all``. An unset or empty list means ``default``;
one that starts with a removal starts from ``default``. The switch variable turns the engine's
own switches on besides (see ``plan.py``); a removal here turns them off all the same.

- White space around a term, and after ``-`` or ``@``, is ignored. Inside a name it is an
  error: a comma is missing.
- Empty terms (``a,,b``, a trailing comma) are ignored; a list of nothing else is empty.
- Repeated terms are harmless. The last term that reaches a slot decides.
- Names are case-sensitive.
- A slot is *named* if a term gives its own name and no later term removes it. Only a named slot
  stops the server where it cannot run; what ``all`` or ``@stage`` brings is left out instead.

Read by ``plan.py``; knows no registry and no environment.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Self

from pydantic import field_validator, model_validator

from sgl_mega_plugin.contract.errors import (
    SelectionError,
    UnknownSlotError,
    UpstreamSlotError,
    did_you_mean,
    quoted,
)
from sgl_mega_plugin.contract.slot import LIST_WORDS, Record, Slot
from sgl_mega_plugin.contract.stage import Stage
from sgl_mega_plugin.contract.upstream_names import UPSTREAM_NAMES

SLOTS_VARIABLE = "SGLANG_NVIDIA_MEGAKERNEL_SLOTS"


class TermKind(StrEnum):
    """What a term reaches. The words are spelled as in the list."""

    SLOT = "slot"
    STAGE = "stage"
    DEFAULT = "default"
    ALL = "all"
    NONE = "none"


_WORDS = {word: TermKind(word) for word in sorted(LIST_WORDS)}
_STAGES = tuple(stage.value for stage in Stage)


class Term(Record):
    """One term. ``name`` is the slot's or the stage's, and empty for a word."""

    kind: TermKind
    name: str = ""
    removes: bool = False

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        if self.kind is TermKind.SLOT:
            ok = _is_name(self.name)
        elif self.kind is TermKind.STAGE:
            ok = self.name in _STAGES
        else:
            ok = not self.name and not (self.removes and self.kind is TermKind.NONE)
        if not ok:
            raise ValueError(f"no term of kind {self.kind.value!r} has name {self.name!r}, removes {self.removes}")
        return self

    def __str__(self) -> str:
        sign = "-" if self.removes else ""
        if self.kind is TermKind.SLOT:
            return sign + self.name
        return sign + (f"@{self.name}" if self.kind is TermKind.STAGE else self.kind.value)

    def reaches(self, slot: Slot) -> bool:
        """Whether this term adds or removes a slot."""
        if self.kind is TermKind.SLOT:
            return slot.name == self.name
        if self.kind is TermKind.STAGE:
            return slot.stage.value == self.name
        return slot.default or self.kind is not TermKind.DEFAULT


class Selection(Record):
    """A slot list with its implied ``default`` written out. ``str()`` gives its canonical text."""

    terms: tuple[Term, ...]

    @field_validator("terms")
    @classmethod
    def _starts_from_something(cls, terms: tuple[Term, ...]) -> tuple[Term, ...]:
        return terms if terms and not terms[0].removes else (Term(kind=TermKind.DEFAULT), *terms)

    def __str__(self) -> str:
        return ",".join(str(term) for term in self.terms)


class Choice(Record):
    """What a selection means for a set of slots."""

    names: tuple[str, ...]  # chosen, in the order of the slots given
    named: frozenset[str]  # of these, those the user gave by name
    removed: frozenset[str]  # the last term that reaches the slot takes it out


def parse(text: str | None) -> Selection:
    """Read a slot list; None is an unset one.

    Raises :class:`SelectionError` for a term that is no term, and for an unknown stage.
    Slot names are looked up later, by :func:`apply`.
    """
    terms = [term.strip() for term in (text or "").split(",")]
    return Selection(terms=tuple(_term(term) for term in terms if term))


def render(selection: Selection) -> str:
    """The canonical text of a selection: ``parse`` reads it back as the same selection."""
    return str(selection)


def apply(selection: Selection, slots: Sequence[Slot]) -> Choice:
    """Choose among slots.

    Raises :class:`UnknownSlotError` for a name, added or removed, that none of them has, and its
    subclass :class:`UpstreamSlotError` where the name belongs to NVIDIA's kernel set.
    """
    known = {slot.name for slot in slots}
    chosen: set[str] = set()
    named: set[str] = set()
    removed: set[str] = set()
    for term in selection.terms:
        if term.kind is TermKind.SLOT and term.name not in known:
            where = f"{SLOTS_VARIABLE}={str(selection)!r}"
            raise unknown_slot(term.name, [slot.name for slot in slots], where=where, words=LIST_WORDS)
        reached = {slot.name for slot in slots if term.reaches(slot)}
        if term.removes or term.kind is TermKind.NONE:
            chosen -= reached
            named -= reached
            removed |= reached
            continue
        chosen |= reached
        removed -= reached
        if term.kind is TermKind.SLOT:
            named |= reached
    names = tuple(slot.name for slot in slots if slot.name in chosen)
    return Choice(names=names, named=frozenset(named), removed=frozenset(removed))


def unknown_slot(name: str, known: Sequence[str], *, where: str, words: Collection[str] = ()) -> UnknownSlotError:
    """The error for a name that no slot has, with every known name; near misses among those and ``words``."""
    there = f"Slots here: {quoted(known)}."
    upstream = UPSTREAM_NAMES.get(name)
    if upstream is not None:
        return UpstreamSlotError(
            f"{where}: {name!r} is {upstream.describe()}; nothing installed here provides it. "
            f"Leave it out, or install a distribution that does. {there}"
        )
    hint = did_you_mean(name, [*known, *sorted(words)])
    return UnknownSlotError(f"{where}: no slot is named {name!r}. {hint}{there}")


def _is_name(text: str) -> bool:
    """Whether a text can stand for a slot in a list; whether a slot has that name is another matter."""
    clean = text.isprintable() and "," not in text and not any(char.isspace() for char in text)
    return bool(text) and clean and text[0] not in "-@" and text not in _WORDS


def _term(text: str) -> Term:
    removes = text.startswith("-")
    body = text[1:].lstrip() if removes else text
    if body.startswith("@"):
        stage = body[1:].lstrip()
        if stage not in _STAGES:
            raise SelectionError(
                f"{SLOTS_VARIABLE}: term {text!r}: no stage is named {stage!r}. "
                f"{did_you_mean(stage, _STAGES)}Stages: {quoted('@' + name for name in _STAGES)}."
            )
        return Term(kind=TermKind.STAGE, name=stage, removes=removes)
    if body == TermKind.NONE.value and removes:
        raise SelectionError(
            f"{SLOTS_VARIABLE}: term {text!r} removes nothing: write 'none' to empty the list, 'all' to fill it"
        )
    if body in _WORDS:
        return Term(kind=_WORDS[body], removes=removes)
    if any(char.isspace() for char in body):
        raise SelectionError(f"{SLOTS_VARIABLE}: term {text!r} holds white space: separate terms with commas")
    if not _is_name(body):
        raise SelectionError(
            f"{SLOTS_VARIABLE}: term {text!r} is no term: write a slot name, '@stage', 'default', 'all' or 'none', "
            f"with at most one '-' in front (not before 'none')"
        )
    return Term(kind=TermKind.SLOT, name=body, removes=removes)
