"""The kit catches broken slots: each slot here has one fault, and the kit has to name it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.conformance.arguments import copy_of, poison, trespasses
from sgl_mega_plugin.conformance.compare import difference
from sgl_mega_plugin.conformance.report import Report
from sgl_mega_plugin.conformance.runner import conform
from sgl_mega_plugin.contract import Backend, Case, Provided, Slot, SlotSetup, Stage
from sgl_mega_plugin.contract.errors import SelectionError, UnknownSlotError
from sgl_mega_plugin.registry import Registry
from sgl_mega_slots import SLOTS
from sgl_mega_slots.verify_accept.accept_tail.cases import arguments
from sgl_mega_slots.verify_accept.accept_tail.reference import greedy_accept

_VOCAB = 9


class Faultless:
    """`greedy_accept` in torch; a subclass breaks one thing afterwards."""

    def __init__(self, setup: SlotSetup) -> None:
        self.setup = setup
        self.calls = 0

    def __call__(
        self,
        *,
        candidates: Tensor,
        target_logits: Tensor | None,
        target_tokens: Tensor | None,
        seq_lens: Tensor,
        verify_lens: Tensor,
        simulated_correct: Tensor | None,
        out_correct_lens: Tensor,
        out_bonus_tokens: Tensor,
        out_commit_lens: Tensor,
        out_new_seq_lens: Tensor,
        out_tokens: Tensor,
    ) -> None:
        self.calls += 1
        values = {name: value for name, value in locals().items() if name != "self"}
        before = copy_of(values)
        greedy_accept(**values)
        self.damage(values, before)

    def damage(self, values: dict[str, Any], before: dict[str, Any]) -> None:
        """Break something; ``before`` holds the arguments as they were, poison included."""


class IdOutOfRange(Faultless):
    def damage(self, values: dict[str, Any], before: dict[str, Any]) -> None:
        values["out_bonus_tokens"][0] = _VOCAB


class WriteInPaddedRow(Faultless):
    def damage(self, values: dict[str, Any], before: dict[str, Any]) -> None:
        values["out_commit_lens"][values["verify_lens"] == 0] = 1


class InputModified(Faultless):
    def damage(self, values: dict[str, Any], before: dict[str, Any]) -> None:
        values["seq_lens"] += 1


class OutputNotWritten(Faultless):
    def damage(self, values: dict[str, Any], before: dict[str, Any]) -> None:
        values["out_tokens"].copy_(before["out_tokens"])


class WriteBesideOutput(Faultless):
    def damage(self, values: dict[str, Any], before: dict[str, Any]) -> None:
        tokens = values["out_tokens"]
        tokens.as_strided(tokens.shape, tokens.stride(), tokens.storage_offset() + 1)[-1, -1] = 0x7777


class StateKept(Faultless):
    def damage(self, values: dict[str, Any], before: dict[str, Any]) -> None:
        if self.calls > 1:
            values["out_new_seq_lens"] += 1


class Raises(Faultless):
    def damage(self, values: dict[str, Any], before: dict[str, Any]) -> None:
        raise ValueError("candidates: the cause")


class WrongSignature:
    def __init__(self, setup: SlotSetup) -> None: ...

    def __call__(self, *, candidates: Tensor, logits: Tensor) -> None: ...


class NeedsRightSetup(Faultless):
    sizes: ClassVar[list[tuple[int, int, int]]] = []

    def damage(self, values: dict[str, Any], before: dict[str, Any]) -> None:
        setup = self.setup
        self.sizes.append((setup.max_batch, setup.gamma, setup.vocab_size))


def _logits() -> Tensor:
    return torch.randn(6, _VOCAB, generator=torch.Generator().manual_seed(0))


def two_cases() -> Iterator[Case]:
    """One live and one padding row, contiguous and strided; and one that is only for a GPU."""
    candidates = torch.tensor([[0, 1, 2], [3, 4, 5]])
    yield Case("plain", lambda device: arguments(_logits(), candidates, verify_lens=[3, 0]))
    yield Case("strided", lambda device: arguments(_logits(), candidates, verify_lens=[3, 0], stride=True))
    yield Case("large", lambda device: arguments(_logits(), candidates), kernel_only=True)


def wrong_case() -> Iterator[Case]:
    yield Case("short", lambda device: {"candidates": torch.zeros(1, 2)})


def _run(implementation: type, cases: str = "two_cases", only: str = "") -> Report:
    slot = Slot(
        name="made_up",
        stage=Stage.VERIFY_ACCEPT,
        seam="greedy_accept",
        summary="a slot with one fault",
        implementation=f"{__name__}:{implementation.__name__}",
        reference="sgl_mega_slots.verify_accept.accept_tail.reference:greedy_accept",
        cases=f"{__name__}:{cases}",
    )
    registry = Registry.of([Provided(slot=slot, distribution="made-up", version="1")])
    return conform(registry, backend=Backend.INTERPRETER, only=only)


def test_a_faultless_slot_passes() -> None:
    report = _run(Faultless)
    (slot,) = report.slots
    assert report.ok
    assert (slot.run, slot.passed, slot.failures, slot.skipped) == (2, 2, (), ("large",))


@pytest.mark.parametrize(
    ("fault", "details"),
    [
        (IdOutOfRange, ["first call: out_bonus_tokens[0]: found 9, expected ", ", bit for bit; 1 of 2 differ"]),
        (WriteInPaddedRow, ["first call: out_commit_lens[1]: found 1, expected 0"]),
        (InputModified, ["first call: input 'seq_lens' was written: element 0 of its storage was 5, is 6"]),
        (OutputNotWritten, ["first call: out_tokens[0, 0]: found 2147483647, expected "]),
        (StateKept, ["another rank, its memory filled anew: out_new_seq_lens[0]: found "]),
        (Raises, ["ValueError: candidates: the cause"]),
    ],
)
def test_a_fault_is_named(fault: type, details: list[str]) -> None:
    report = _run(fault)
    (slot,) = report.slots
    assert not report.ok
    assert [failure.case for failure in slot.failures] == ["plain", "strided"]
    for failure in slot.failures:
        for detail in details:
            assert detail in failure.text


def test_a_write_beside_an_output_is_named() -> None:
    (slot,) = _run(WriteBesideOutput).slots
    (failure,) = [case for case in slot.failures if case.case == "strided"]
    assert "memory around 'out_tokens' was written: element " in failure.text
    assert "was 0, is 30583 (2 bytes changed)" in failure.text


def test_a_text_chooses_cases_by_their_names(builtin_slots: Registry) -> None:
    report = conform(builtin_slots, backend=Backend.REFERENCE, only="out_of_range", generated=2)
    assert {slot.slot for slot in report.slots} >= {"markov", "step_inputs"}
    assert all("out_of_range" in case.case for slot in report.slots for case in slot.cases)
    assert report.ok
    with pytest.raises(SelectionError, match="no case has 'nothing like it' in its name"):
        conform(builtin_slots, backend=Backend.REFERENCE, only="nothing like it")


@pytest.mark.parametrize("only", ["", "a text of no case's name"])
def test_a_slot_that_does_not_fit_its_seam_fails_as_a_whole(only: str) -> None:
    (slot,) = _run(WrongSignature, only=only).slots
    assert (slot.run, slot.passed, slot.ok) == (1, 0, False)
    assert slot.failures[0].case == "(load)"
    assert "has 'logits', which the seam does not pass" in slot.failures[0].text


def test_a_case_that_lacks_arguments_fails() -> None:
    (slot,) = _run(Faultless, cases="wrong_case").slots
    assert "the case makes ['candidates']; seam 'greedy_accept' takes ['candidates', 'out_bonus_tokens'" in (
        slot.failures[0].text
    )


def test_a_slot_is_built_for_the_sizes_of_the_case() -> None:
    NeedsRightSetup.sizes.clear()
    assert _run(NeedsRightSetup).ok
    assert NeedsRightSetup.sizes == [(2, 2, _VOCAB)] * 6


def test_unknown_and_engine_backed_names(builtin_slots: Registry) -> None:
    with pytest.raises(UnknownSlotError, match="accept_tail"):
        conform(builtin_slots, backend=Backend.REFERENCE, names=["accept_tial"])
    switch = Slot(name="engines_own", stage=Stage.GLUE, summary="a switch", engine_switch="SGLANG_OPT_X")
    registry = Registry.of([Provided(slot=switch, distribution="made-up", version="1")])
    with pytest.raises(SelectionError, match="engines_own: the engine's own code"):
        conform(registry, backend=Backend.REFERENCE, names=["engines_own"])
    assert not conform(registry, backend=Backend.REFERENCE).ok, "a run of no slot must not pass"


def test_references_pass_their_own_cases_and_the_report_is_json(builtin_slots: Registry) -> None:
    told = []
    report = conform(builtin_slots, backend=Backend.REFERENCE, on_result=told.append)
    assert report.ok
    assert [slot.slot for slot in report.slots] == [slot.name for slot in SLOTS]
    assert sum(slot.run for slot in report.slots) == len(told)
    found = report.model_dump(mode="json")
    assert found["ok"] is True
    assert found["backend"] == "reference"
    assert found["slots"][0]["passed"] == found["slots"][0]["run"] >= 20


@pytest.mark.parametrize(
    ("found", "expected", "bound", "line"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, None),
        ([1.0, 2.5], [1.0, 2.0], 0.0, "x[1]: found 2.5, expected 2.0, bit for bit; 1 of 2 differ"),
        ([float("nan"), 2.0], [float("nan"), 2.0], 0.0, None),
        ([0.0, 2.0], [-0.0, 2.0], 0.0, "x[0]: found 0.0, expected -0.0, bit for bit; 1 of 2 differ"),
        ([1.0, 2.02], [1.0, 2.0], 0.01, None),
        (
            [1.0, 2.03],
            [1.0, 2.0],
            0.01,
            "x[1]: found 2.0299999713897705, expected 2.0, relative bound 0.01; 1 of 2 differ",
        ),
        ([0.01, 2.0], [0.0, 2.0], 0.01, None),  # a zero in a row of root mean square 1.41
        (
            [0.02, 2.0],
            [0.0, 2.0],
            0.01,
            "x[0]: found 0.019999999552965164, expected 0.0, relative bound 0.01; 1 of 2 differ",
        ),
        (
            [1e9, 2.0],
            [float("inf"), 2.0],
            0.5,
            "x[0]: found 1000000000.0, expected inf, relative bound 0.5; 1 of 2 differ",
        ),
        ([float("nan"), 2.0], [1.0, 2.0], 0.5, "x[0]: found nan, expected 1.0, relative bound 0.5; 1 of 2 differ"),
        ([1.0, 2.0], [float("nan"), 2.0], 0.5, "x[0]: found 1.0, expected nan, relative bound 0.5; 1 of 2 differ"),
        ([3, 4], [3, 5], 0.5, "x[1]: found 4, expected 5, bit for bit; 1 of 2 differ"),
    ],
)
def test_difference(found: list[float], expected: list[float], bound: float, line: str | None) -> None:
    assert difference("x", torch.tensor(found), torch.tensor(expected), bound) == line


def test_copies_keep_strides_and_shared_memory() -> None:
    pool = torch.arange(24.0).view(2, 3, 4)
    values = {"a": pool[0, :, 1:3], "out_b": [pool[1, :2], pool[1, 2:]], "n": 3, "none": None}
    copy = copy_of(values)
    assert copy["a"].stride() == values["a"].stride()
    assert copy["n"] == 3
    copy["out_b"][0].fill_(-1.0)
    assert copy["a"].untyped_storage().data_ptr() == copy["out_b"][0].untyped_storage().data_ptr()
    assert values["out_b"][0].min() == 12.0
    assert trespasses(copy, copy_of(values)) == []
    copy["out_b"][1].view(-1).as_strided((1,), (1,), 11).fill_(5.5)
    assert trespasses(copy, values) == [
        "input 'a' was written: element 11 of its storage was 11.0, is 5.5 (2 bytes changed)"
    ]


def test_poison_leaves_what_is_kept() -> None:
    values = {
        "x": torch.ones(2),
        "out_x": torch.ones(2),
        "out_n": torch.ones(2, dtype=torch.int64),
        "out_k": [torch.ones(2)],
    }
    poison(values, frozenset({"out_k"}))
    assert values["out_x"].isnan().all()
    assert values["out_n"].tolist() == [0x7FFFFFFF] * 2
    assert values["x"].tolist() == values["out_k"][0].tolist() == [1.0, 1.0]
