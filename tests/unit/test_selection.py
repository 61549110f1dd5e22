"""The slot list: reading, writing, and what it chooses, against a twin written the other way round."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_slots import kernel_slot
from pydantic import ValidationError

from sgl_mega_plugin.contract import Slot, Stage
from sgl_mega_plugin.contract.errors import SelectionError, SlotError, UnknownSlotError, UpstreamSlotError
from sgl_mega_plugin.contract.selection import Choice, Selection, Term, TermKind, apply, parse, render
from sgl_mega_plugin.contract.upstream_names import UPSTREAM_NAMES
from sgl_mega_plugin.switch import ENGINE_SLOTS

SLOTS: tuple[Slot, ...] = (
    kernel_slot("markov", Stage.DRAFT, default=True),
    kernel_slot("accept_tail", Stage.VERIFY_ACCEPT, default=True),
    kernel_slot("accept_slow", Stage.VERIFY_ACCEPT),
    kernel_slot("step_inputs", Stage.GLUE, default=True),
    next(slot for slot in ENGINE_SLOTS if slot.name == "post_fold"),
    kernel_slot("context_kv", Stage.COMMIT),
)
NAMES = tuple(slot.name for slot in SLOTS)
DEFAULT = ("markov", "accept_tail", "step_inputs")

NAME_TERMS = st.builds(Term, kind=st.just(TermKind.SLOT), name=st.sampled_from(NAMES), removes=st.booleans())
ODD_NAMES = st.from_regex(r"\A[a-zA-Z_é][\w\-@.]{0,12}\Z").filter(lambda name: name not in ("default", "all", "none"))
ODD_TERMS = st.builds(Term, kind=st.just(TermKind.SLOT), name=ODD_NAMES, removes=st.booleans())
STAGE_TERMS = st.builds(
    Term, kind=st.just(TermKind.STAGE), name=st.sampled_from([stage.value for stage in Stage]), removes=st.booleans()
)
WORD_TERMS = st.builds(Term, kind=st.sampled_from([TermKind.DEFAULT, TermKind.ALL]), removes=st.booleans()) | st.just(
    Term(kind=TermKind.NONE)
)
KNOWN_TERMS = NAME_TERMS | STAGE_TERMS | WORD_TERMS
BLANKS = st.text(alphabet=" \t\n\u00a0\u2003", max_size=3)


def twin(terms: list[Term]) -> Choice:
    """What a list chooses, slot by slot and from the last term backwards."""
    sequence = [*terms]
    if not sequence or sequence[0].removes:
        sequence.insert(0, Term(kind=TermKind.DEFAULT))
    names, named, removed = [], set(), set()
    for slot in SLOTS:
        touching = [
            term
            for term in sequence
            if term.kind in (TermKind.ALL, TermKind.NONE)
            or (term.kind is TermKind.DEFAULT and slot.name in DEFAULT)
            or term.name in (slot.name, str(slot.stage))
        ]
        since_removal: list[Term] = []
        for term in reversed(touching):
            if term.removes or term.kind is TermKind.NONE:
                break
            since_removal.append(term)
        if since_removal:
            names.append(slot.name)
        elif touching:
            removed.add(slot.name)
        if any(term.kind is TermKind.SLOT for term in since_removal):
            named.add(slot.name)
    return Choice(names=tuple(names), named=frozenset(named), removed=frozenset(removed))


@settings(deadline=None)
@given(st.lists(KNOWN_TERMS | ODD_TERMS, max_size=8))
def test_a_rendered_selection_reads_back_as_itself(terms: list[Term]) -> None:
    selection = Selection(terms=tuple(terms))
    assert parse(render(selection)) == selection
    assert render(parse(render(selection))) == render(selection)


@settings(deadline=None)
@given(st.lists(KNOWN_TERMS, max_size=8))
def test_apply_agrees_with_the_twin(terms: list[Term]) -> None:
    assert apply(Selection(terms=tuple(terms)), SLOTS) == twin(terms)


@settings(deadline=None)
@given(st.lists(st.tuples(KNOWN_TERMS, BLANKS, BLANKS, BLANKS, st.integers(0, 2)), max_size=6))
def test_blanks_and_empty_terms_change_nothing(parts: list[tuple[Term, str, str, str, int]]) -> None:
    text = ""
    for term, before, inside, after, commas in parts:
        sign, body = ("-", str(term)[1:]) if term.removes else ("", str(term))
        at, body = ("@", body[1:]) if body.startswith("@") else ("", body)
        spaced = before + sign + (inside if sign else "") + at + (inside if at else "") + body + after
        text += spaced + "," + "," * commas
    assert parse(text) == Selection(terms=tuple(term for term, *_ in parts))


@settings(deadline=None)
@given(st.text(max_size=30) | st.text(alphabet="-@, \tadefultnoe_", max_size=30))
@example("\udc80")
@example("-")
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        selection = parse(text)
    except SelectionError:
        return
    assert parse(render(selection)) == selection


@pytest.mark.parametrize(
    ("text", "canonical", "names"),
    [
        pytest.param(None, "default", DEFAULT, id="unset"),
        pytest.param("", "default", DEFAULT, id="empty"),
        pytest.param(" \t\n", "default", DEFAULT, id="blank"),
        pytest.param(",, ,", "default", DEFAULT, id="commas"),
        pytest.param("none", "none", (), id="none"),
        pytest.param("all", "all", NAMES, id="all"),
        pytest.param("accept_slow", "accept_slow", ("accept_slow",), id="one-name-alone"),
        pytest.param("context_kv,markov", "context_kv,markov", ("markov", "context_kv"), id="order-of-slots"),
        pytest.param("markov,markov", "markov,markov", ("markov",), id="repeated"),
        pytest.param(",markov,,", "markov", ("markov",), id="empty-terms"),
        pytest.param(" - @ glue , markov", "default,-@glue,markov", ("markov", "accept_tail"), id="white-space"),
        pytest.param("-markov", "default,-markov", ("accept_tail", "step_inputs"), id="removal-starts-from-default"),
        pytest.param("-context_kv", "default,-context_kv", DEFAULT, id="removal-of-an-absent-one"),
        pytest.param("-@glue", "default,-@glue", ("markov", "accept_tail"), id="removal-of-a-stage"),
        pytest.param("-all", "default,-all", (), id="removal-of-all"),
        pytest.param("-default", "default,-default", (), id="removal-of-default"),
        pytest.param("all,-default", "all,-default", ("accept_slow", "post_fold", "context_kv"), id="all-but-default"),
        pytest.param("@glue", "@glue", ("step_inputs", "post_fold"), id="stage-with-the-engine-switch"),
        pytest.param("-markov,markov", "default,-markov,markov", DEFAULT, id="last-term-decides"),
        pytest.param("markov,none", "markov,none", (), id="none-clears"),
        pytest.param("default,post_fold", "default,post_fold", (*DEFAULT, "post_fold"), id="default-and-one"),
    ],
)
def test_lists(text: str | None, canonical: str, names: tuple[str, ...]) -> None:
    selection = parse(text)
    assert render(selection) == canonical
    assert set(apply(selection, SLOTS).names) == set(names)
    assert apply(selection, SLOTS).names == tuple(name for name in NAMES if name in names)


@pytest.mark.parametrize(
    ("text", "named", "removed"),
    [
        pytest.param("all", set(), set(), id="sets-name-nothing"),
        pytest.param("post_fold,all", {"post_fold"}, set(), id="a-set-keeps-a-name"),
        pytest.param("post_fold,-@glue,@glue", set(), set(), id="a-removal-forgets-a-name"),
        pytest.param("-post_fold", set(), {"post_fold"}, id="removed"),
        pytest.param("markov,none", set(), set(NAMES), id="none-removes-all"),
    ],
)
def test_named_and_removed(text: str, named: set[str], removed: set[str]) -> None:
    choice = apply(parse(text), SLOTS)
    assert (choice.named, choice.removed) == (named, removed)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        pytest.param("@glu", ["'@glu'", "Did you mean 'glue'?", "'@verify_accept'"], id="stage"),
        pytest.param("@", ["'@'", "'@draft'"], id="bare-at"),
        pytest.param("-", ["'-'", "slot name"], id="bare-minus"),
        pytest.param("--markov", ["'--markov'", "at most one '-'"], id="two-minuses"),
        pytest.param("@@glue", ["'@@glue'", "'@glue'"], id="two-ats"),
        pytest.param("-none", ["'-none'", "'none'"], id="minus-none"),
        pytest.param("markov accept_tail", ["'markov accept_tail'", "commas"], id="missing-comma"),
        pytest.param("mar\x00kov", ["mar\\x00kov", "slot name"], id="unprintable"),
    ],
)
def test_terms_that_are_none(text: str, parts: list[str]) -> None:
    with pytest.raises(SelectionError) as caught:
        parse(f"default,{text}")
    assert not isinstance(caught.value, UnknownSlotError)
    missing = [part for part in ["SGLANG_NVIDIA_MEGAKERNEL_SLOTS", *parts] if part not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        pytest.param("accept_tial", ["'accept_tial'", "Did you mean 'accept_tail'"], id="letters-swapped"),
        pytest.param("-markof", ["'markof'", "Did you mean 'markov'"], id="removed"),
        pytest.param("Markov", ["'Markov'", "Did you mean 'markov'"], id="case"),
        pytest.param("DEFAULT", ["'DEFAULT'", "Did you mean 'default'"], id="word-in-capitals"),
        pytest.param("qqqq", ["'qqqq'", *(repr(name) for name in NAMES)], id="nothing-near"),
    ],
)
def test_unknown_names(text: str, parts: list[str]) -> None:
    with pytest.raises(UnknownSlotError) as caught:
        apply(parse(text), SLOTS)
    assert not isinstance(caught.value, UpstreamSlotError)
    assert isinstance(caught.value, SlotError)
    missing = [part for part in ["SGLANG_NVIDIA_MEGAKERNEL_SLOTS", *parts] if part not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


def test_there_are_42_upstream_names_three_of_them_opt_in() -> None:
    assert len(UPSTREAM_NAMES) == 42
    assert {name for name, entry in UPSTREAM_NAMES.items() if not entry.default} == {
        "target_lm_head",
        "hop_b_quad_trigger",
        "lm_head_pinned_tactic",
    }
    assert all(entry.name == name and entry.about for name, entry in UPSTREAM_NAMES.items())


@pytest.mark.parametrize("name", UPSTREAM_NAMES)
def test_upstream_names_are_answered_or_ours(name: str) -> None:
    if name in NAMES:
        assert apply(parse(name), SLOTS).names == (name,)
        return
    for text in (name, f"-{name}"):
        with pytest.raises(UpstreamSlotError) as caught:
            apply(parse(text), SLOTS)
        message = str(caught.value)
        assert repr(name) in message
        assert "NVIDIA's DeepSeek-V4.1 kernel set" in message
        assert UPSTREAM_NAMES[name].about in message
        assert "'accept_tail'" in message


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"kind": TermKind.SLOT, "name": ""}, id="slot-without-name"),
        pytest.param({"kind": TermKind.SLOT, "name": "all"}, id="slot-named-as-a-word"),
        pytest.param({"kind": TermKind.SLOT, "name": "a,b"}, id="comma"),
        pytest.param({"kind": TermKind.STAGE, "name": "glu"}, id="no-stage"),
        pytest.param({"kind": TermKind.ALL, "name": "markov"}, id="word-with-name"),
        pytest.param({"kind": TermKind.NONE, "removes": True}, id="minus-none"),
    ],
)
def test_a_term_that_cannot_be_written_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Term.model_validate(fields)
