"""Discovery of slots, and what is refused with the distribution's name in the message."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_slots import install, kernel_slot, provided, registry_of

from sgl_mega_plugin.contract import Provided, Requirements, Slot, Stage
from sgl_mega_plugin.contract.errors import (
    DuplicateSlotError,
    EntryPointError,
    ImplementationError,
    RegistryError,
    UnknownSlotError,
)
from sgl_mega_plugin.contract.seams import SEAMS
from sgl_mega_plugin.registry import Registry, load_cases, load_implementation, load_reference
from sgl_mega_plugin.switch import ENGINE_SLOTS
from sgl_mega_slots import SLOTS

SLOT_SOURCE = """
from sgl_mega_plugin.contract import Slot, Stage
def slot(name, summary="made up"):
    return Slot(name=name, stage=Stage.GLUE, summary=summary, seam="step_inputs",
                implementation="nowhere:A", reference="nowhere:b", cases="nowhere:c")
SLOTS = (slot("made_up"),)
TWICE = (slot("made_up"), slot("made_up"))
TWO_MEANINGS = (slot("made_up"), slot("made_up", "another"))
NOT_SLOTS = (slot("made_up"), "accept_tail")
NO_SEQUENCE = 7
TEXT = "made_up"
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for installed distributions, first on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_discovery_keeps_who_provides_each_slot(site: Path) -> None:
    install(site, "made-slots", "made_a", SLOT_SOURCE)
    entry = Registry.discover().get("made_up")
    assert (entry.distribution, entry.version) == ("made-slots", "2.5")


def test_discovery_finds_the_engine_switches_where_the_package_announces_them(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(site)])
    install(site, "announcer", "made_b", "from sgl_mega_plugin.switch import ENGINE_SLOTS as SLOTS")
    found = Registry.discover()
    assert {slot.name for slot in found.slots()} == {slot.name for slot in ENGINE_SLOTS}


def test_nothing_installed_says_what_to_install(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(site)])
    with pytest.raises(RegistryError, match="install sgl-mega-plugin"):
        Registry.discover()


def test_the_same_registration_twice_is_harmless(site: Path) -> None:
    install(site, "made-slots", "made_c", SLOT_SOURCE, value="TWICE")
    assert [slot.name for slot in Registry.discover().slots()].count("made_up") == 1


def test_two_distributions_with_one_name_are_both_named(site: Path) -> None:
    install(site, "made-slots", "made_d", SLOT_SOURCE)
    install(site, "other-slots", "made_e", SLOT_SOURCE)
    with pytest.raises(DuplicateSlotError, match=r"'made_up' .*made-slots 2\.5 and by other-slots 2\.5: uninstall"):
        Registry.discover()


def test_two_meanings_of_one_name_are_refused(site: Path) -> None:
    install(site, "made-slots", "made_f", SLOT_SOURCE, value="TWO_MEANINGS")
    with pytest.raises(DuplicateSlotError, match=r"'made_up' is registered twice, differently, by made-slots 2\.5"):
        Registry.discover()


@pytest.mark.parametrize(
    ("module", "source", "value", "says"),
    [
        pytest.param(
            "made_g", "import absent_lib", "SLOTS", "ModuleNotFoundError: No module named 'absent_lib'", id="import"
        ),
        pytest.param("made_h", "1 / 0", "SLOTS", "ZeroDivisionError: division by zero", id="raises"),
        pytest.param("made_i", SLOT_SOURCE, "ABSENT", "AttributeError", id="no-attribute"),
        pytest.param("made_j", SLOT_SOURCE, "NO_SEQUENCE", "is of type 'int'", id="no-sequence"),
        pytest.param("made_k", SLOT_SOURCE, "TEXT", "is of type 'str'", id="text"),
        pytest.param("made_l", SLOT_SOURCE, "NOT_SLOTS", "of type 'str' at index 1", id="not-slots"),
        pytest.param("made_m", SLOT_SOURCE.replace("GLUE", "DRAFT"), "SLOTS", "belongs to stage", id="invalid-slot"),
    ],
)
def test_broken_entry_points(site: Path, module: str, source: str, value: str, says: str) -> None:
    install(site, "broken-slots", module, source, value=value)
    with pytest.raises(EntryPointError) as caught:
        Registry.discover()
    missing = [
        part for part in [says, "'made'", f"{module}:{value}", "broken-slots 2.5"] if part not in str(caught.value)
    ]
    assert not missing, f"{missing} not in {caught.value}"


def test_slots_come_in_stage_order_kernels_before_switches() -> None:
    registry = registry_of(
        kernel_slot("late", Stage.COMMIT), kernel_slot("mine", Stage.GLUE), kernel_slot("early", Stage.DRAFT)
    )
    order = list(Stage)
    stages = [order.index(slot.stage) for slot in registry.slots()]
    assert stages == sorted(stages)
    assert next(slot.name for slot in registry.slots() if slot.stage is Stage.GLUE) == "mine"
    assert tuple(entry.slot for entry in registry.provided) == registry.slots()


def test_get_answers_with_near_misses() -> None:
    with pytest.raises(UnknownSlotError, match=r"Did you mean 'accept_tail'"):
        registry_of(kernel_slot("accept_tail")).get("accept_tial")


@pytest.mark.parametrize("word", ["all", "none", "nope"])
def test_get_does_not_offer_the_words_of_a_slot_list(word: str) -> None:
    with pytest.raises(UnknownSlotError) as caught:
        registry_of(kernel_slot("markov", stage=Stage.DRAFT)).get(word)
    assert f"no slot is named {word!r}" in str(caught.value)
    assert "Did you mean" not in str(caught.value)


def test_a_need_that_exists_nowhere_names_the_distribution() -> None:
    slot = kernel_slot("accept_tail", needs=frozenset({"post_fald"}))
    with pytest.raises(
        RegistryError, match=r"'accept_tail' of sgl-mega-plugin 1\.0 needs slot 'post_fald'.*'post_fold'"
    ):
        registry_of(slot)


def test_a_conflict_with_an_absent_slot_is_none() -> None:
    assert registry_of(kernel_slot("accept_tail", conflicts=frozenset({"elsewhere"}))).get("accept_tail")


def test_a_declined_feature_has_to_exist() -> None:
    slot = kernel_slot("accept_tail", requires=Requirements(declines=frozenset({"gramar"})))
    with pytest.raises(RegistryError, match=r"feature 'gramar'.*Did you mean 'grammar'"):
        registry_of(slot)


def test_an_engine_variable_has_one_slot() -> None:
    copy = ENGINE_SLOTS[0].model_copy(update={"name": "another"})
    with pytest.raises(RegistryError, match=f"both backed by {ENGINE_SLOTS[0].engine_switch}"):
        registry_of(copy)


SEAM = SEAMS["greedy_accept"]
ARGUMENTS = ", ".join(SEAM.parameters)
GOOD = f"""
from sgl_mega_plugin.contract import Case
class Kernel:
    def __init__(self, setup): ...
    def __call__(self, *, {ARGUMENTS}): ...
class Derived(Kernel): ...
class NoSetup:
    def __call__(self, *, {ARGUMENTS}): ...
class TwoArguments:
    def __init__(self, setup, more): ...
    def __call__(self, *, {ARGUMENTS}): ...
class NoCall:
    def __init__(self, setup): ...
class Misfit:
    def __init__(self, setup): ...
    def __call__(self, candidates, *, logits, {ARGUMENTS.removeprefix("candidates, ")}): ...
class Catching:
    def __init__(self, setup): ...
    def __call__(self, **everything): ...
def reference(*, {ARGUMENTS}): ...
def short(*, candidates): ...
def cases():
    yield Case("one", make=lambda device: {{}})
    yield Case("two", make=lambda device: {{}})
def same_case():
    return [Case("one", make=dict), Case("one", make=dict)]
def no_case():
    return []
def not_cases():
    return ["one"]
def failing_cases():
    raise KeyError("shape")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "made_code.py").write_text(GOOD)
    (tmp_path / "made_bad.py").write_text("import absent_lib")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "made_code"
    sys.modules.pop("made_code", None)


def with_path(role: str, path: str) -> Provided:
    return provided(kernel_slot("accept_tail", **{role: path}), "third-party", "3.1")


def test_what_fits_is_loaded(module: str) -> None:
    assert load_implementation(with_path("implementation", f"{module}:Kernel")).__name__ == "Kernel"
    assert load_implementation(with_path("implementation", f"{module}:Derived")).__name__ == "Derived"
    assert load_reference(with_path("reference", f"{module}:reference")).__name__ == "reference"
    assert [case.id for case in load_cases(with_path("cases", f"{module}:cases"))] == ["one", "two"]


@pytest.mark.parametrize(
    ("role", "path", "parts"),
    [
        ("implementation", "made_code:Kernal", ["no 'Kernal'", "Did you mean 'Kernel'"]),
        ("implementation", "made_absent:Kernel", ["cannot be imported", "made_absent"]),
        ("implementation", "made_bad:Kernel", ["ModuleNotFoundError: No module named 'absent_lib'"]),
        ("implementation", "made_code:reference", ["of type 'function', not a class"]),
        ("implementation", "made_code:NoSetup", ["cannot be built with one argument"]),
        ("implementation", "made_code:TwoArguments", ["cannot be built with one argument", "'more'"]),
        ("implementation", "made_code:NoCall", ["has no __call__"]),
        (
            "implementation",
            "made_code:Misfit",
            ["lacks 'candidates'", "has 'logits'", "'candidates' is positional or keyword", "'greedy_accept'"],
        ),
        ("implementation", "made_code:Catching", ["lacks 'seq_lens'", "'everything' is variadic keyword"]),
        ("reference", "made_code:Kernel", ["the class 'Kernel', not a function"]),
        ("reference", "made_code:short", [f"lacks {name!r}" for name in SEAM.parameters[1:]]),
        ("cases", "made_code:same_case", ["id 'one' twice"]),
        ("cases", "made_code:no_case", ["yields no case"]),
        ("cases", "made_code:not_cases", ["of type 'str', not a Case"]),
        ("cases", "made_code:failing_cases", ["KeyError: 'shape'"]),
        ("cases", "made_code:GOOD", ["no 'GOOD'"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("module")
def test_what_does_not_fit_is_refused_at_load(role: str, path: str, parts: list[str]) -> None:
    load = {"implementation": load_implementation, "reference": load_reference, "cases": load_cases}[role]
    with pytest.raises(ImplementationError) as caught:
        load(with_path(role, path))
    wanted = ["'accept_tail'", "third-party 3.1", role, path, *parts]
    missing = [part for part in wanted if part not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


@pytest.mark.parametrize("load", [load_implementation, load_reference, load_cases])
def test_an_engine_switch_has_nothing_to_load(load: Callable[[Provided], object]) -> None:
    slot = ENGINE_SLOTS[0]
    with pytest.raises(ImplementationError, match=f"switched by {slot.engine_switch}"):
        load(provided(slot))


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.name)
def test_built_in_slots_fit_their_seams(slot: Slot) -> None:
    entry = registry_of(*SLOTS).get(slot.name)
    assert load_implementation(entry).__module__.startswith("sgl_mega_slots.")
    assert load_reference(entry).__module__.startswith("sgl_mega_slots.")
    assert load_cases(entry)
