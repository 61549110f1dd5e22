"""What the kit sees beyond a comparison of two calls: each check on a slot that only this check can catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.conformance.arguments import near_tie, relocated, tensors, trespasses
from sgl_mega_plugin.conformance.hostread import host_reads
from sgl_mega_plugin.conformance.runner import conform
from sgl_mega_plugin.conformance.seam_kits.ranges import range_problems
from sgl_mega_plugin.contract import Backend, Case, Provided, Slot, SlotSetup, Stage
from sgl_mega_plugin.registry import Registry
from sgl_mega_slots.glue.step_inputs import cases as step_cases
from sgl_mega_slots.glue.step_inputs.reference import step_inputs
from sgl_mega_slots.verify_accept.accept_tail import cases as accept_cases


class Faultless:
    """`step_inputs` in torch, without a read by the host; a subclass changes what it is given or has done."""

    def __init__(self, setup: SlotSetup) -> None:
        self.setup = setup
        self.prepare()

    def prepare(self) -> None: ...

    def before(self, values: dict[str, Any]) -> None: ...

    def after(self, values: dict[str, Any]) -> None: ...

    def __call__(
        self,
        *,
        req_pool_indices: Tensor,
        req_to_token: Tensor,
        seq_lens: Tensor,
        verify_lens: Tensor,
        anchor_tokens: Tensor,
        relay_lens: Tensor | None,
        relay_tokens: Tensor | None,
        mask_token: int,
        max_positions: int,
        out_positions: Tensor,
        out_cache_locs: Tensor,
        out_draft_ids: Tensor,
        out_seq_lens: Tensor | None,
        out_anchor_tokens: Tensor | None,
    ) -> None:
        values = {name: value for name, value in locals().items() if name != "self"}
        self.before(values)
        step_inputs(**values)
        self.after(values)


class OldAddress(Faultless):
    """Keeps a copy of the lengths for each address: old once the same memory is filled again."""

    kept: ClassVar[dict[int, Tensor]]

    def prepare(self) -> None:
        self.kept = {}  # type: ignore[misc]

    def before(self, values: dict[str, Any]) -> None:
        lens = values["seq_lens"]
        values["seq_lens"] = self.kept.setdefault(lens.data_ptr(), lens.clone())


class FrozenNumber(Faultless):
    """A number of Python's keeps step with one on the device: in every call, and in no replay."""

    def prepare(self) -> None:
        self.calls, self.steps = 0, torch.zeros((), dtype=torch.int64)

    def after(self, values: dict[str, Any]) -> None:
        self.calls += 1
        self.steps += 1
        values["out_draft_ids"][:, 0] += self.steps - self.calls


class DeviceState(Faultless):
    """A counter in memory of its own that a run leaves changed."""

    def prepare(self) -> None:
        self.counter = torch.zeros((), dtype=torch.int64)

    def after(self, values: dict[str, Any]) -> None:
        values["out_positions"] += torch.where(self.counter > 2, 1, 0)
        self.counter += 1


class RankDependent(Faultless):
    """The second instance of a process adds one: two ranks that disagree."""

    built = 0

    def prepare(self) -> None:
        type(self).built += 1
        self.number = 1 - self.built % 2

    def after(self, values: dict[str, Any]) -> None:
        values["out_draft_ids"][:, 0] += self.number


class IgnoresOffset(Faultless):
    """Reads from where the memory begins, which is where the lengths do in most tests."""

    def before(self, values: dict[str, Any]) -> None:
        lens = values["seq_lens"]
        values["seq_lens"] = lens.as_strided(lens.shape, lens.stride(), 0)


class ReadsHost(Faultless):
    def before(self, values: dict[str, Any]) -> None:
        values["verify_lens"].tolist()


def one_case() -> Iterator[Case]:
    yield Case("plain", lambda device: step_cases.arguments(device, seq_lens=[5, 9], gamma=2, verify_lens=[3, 0]))


def _run(implementation: type, **options: Any) -> Any:
    slot = Slot(
        name="made_up",
        stage=Stage.GLUE,
        seam="step_inputs",
        summary="a slot with one fault",
        implementation=f"{__name__}:{implementation.__name__}",
        reference="sgl_mega_slots.glue.step_inputs.reference:step_inputs",
        cases=f"{__name__}:one_case",
    )
    registry = Registry.of([Provided(slot=slot, distribution="made-up", version="1")])
    (result,) = conform(registry, backend=Backend.INTERPRETER, **options).slots
    return result


def test_a_faultless_slot_passes_with_generated_cases() -> None:
    result = _run(Faultless, generated=30, seed=3)
    assert result.ok, result.failures
    assert result.run == 31


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        (OldAddress, "another rank, its memory filled anew: out_positions[0, 0]: found 0, expected 5, bit for bit"),
        (FrozenNumber, "replay 1 of the recorded launches: out_draft_ids[0, 0]: found 49152, expected 49151"),
        (DeviceState, "replay 2 of the recorded launches: out_positions[0, 0]: found 6, expected 5, bit for bit"),
        (RankDependent, "another rank, on zeros: out_draft_ids[0, 0]: found 49152, expected 49151, bit for bit"),
        (IgnoresOffset, "another rank, its memory filled anew: out_positions[0, 0]: found 0, expected 5"),
        (ReadsHost, "first call: host read: Tensor.tolist of int32 [2] at "),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_fault_is_named(fault: type, detail: str) -> None:
    (failure,) = _run(fault).failures
    assert detail in failure.text


_X = torch.tensor([1.0, 2.0, 0.0])
_READS: dict[str, Callable[[], object]] = {
    "item": lambda: _X[0].item(),
    "bool": lambda: bool(_X[0]),
    "int": lambda: int(_X[0]),
    "float": lambda: float(_X[0]),
    "index": lambda: [1, 2, 3][_X[0].long()],
    "slice": lambda: _X[: _X[0].long()],
    "tolist": lambda: _X.tolist(),
    "numpy": lambda: _X.numpy(),
    "cpu": lambda: _X.cpu(),
    "to_cpu": lambda: _X.to("cpu"),
    "print": lambda: str(_X),
    "format": lambda: f"{_X[0]:.1f}",
    "equal": lambda: torch.equal(_X, _X),
    "allclose": lambda: torch.allclose(_X, _X),
    "contains": lambda: 1.0 in _X,
    "nonzero": lambda: _X.nonzero(),
    "where": lambda: torch.where(_X > 0),
    "mask": lambda: _X[_X > 0],
    "put_by_mask": lambda: _X.clone().__setitem__(_X > 0, _X[:2]),
    "masked_select": lambda: torch.masked_select(_X, _X > 0),
    "unique": lambda: torch.unique(_X),
    "repeat": lambda: torch.repeat_interleave(_X, _X.long()),
    "bincount": lambda: torch.bincount(_X.long()),
}
_NO_READS: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: (_X * 2 + 1).sum(),
    "where": lambda: torch.where(_X > 0, _X, 0),
    "fill_by_mask": lambda: _X.clone().masked_fill_(_X > 0, 1.0),
    "put_one_by_mask": lambda: _X.clone().__setitem__(_X > 0, 1.0),
    "gather": lambda: _X[torch.tensor([0, 2])],
    "shape": lambda: _X.shape[0] + _X.stride(0) + _X.data_ptr(),
    "dtype": lambda: _X.to(torch.float64),
    "repeat": lambda: torch.repeat_interleave(_X, 2),
    "copy": lambda: torch.empty(3).copy_(_X),
}


@pytest.mark.parametrize("name", _READS)
def test_a_host_read_is_found(name: str) -> None:
    with host_reads() as found:
        _READS[name]()
    (line,) = found
    assert line.startswith("host read: ")
    assert f"{__file__}:" in line


@pytest.mark.parametrize("name", _NO_READS)
def test_what_is_no_host_read(name: str) -> None:
    with host_reads() as found:
        _NO_READS[name]()
    assert found == []


def test_relocated_arguments_are_equal_and_one_element_off() -> None:
    pool = torch.arange(24.0).view(2, 3, 4)
    values = {"a": pool[0, :, 1:3], "out_b": [pool[1, :2], pool[1, 2:]], "c": torch.arange(3), "n": 3, "none": None}
    moved = relocated(values)
    for (label, old), (_, new) in zip(tensors(values), tensors(moved), strict=True):
        assert torch.equal(old, new), label
        assert new.storage_offset() == old.storage_offset() + 1
        assert new.untyped_storage().nbytes() > old.untyped_storage().nbytes()
    assert moved["a"].untyped_storage().data_ptr() == moved["out_b"][0].untyped_storage().data_ptr()
    c = moved["c"]
    assert c.as_strided((5,), (1,), 0).tolist() == [-1, 0, 1, 2, -1]
    assert trespasses(moved, relocated(values)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_near_tie_is_one_step_of_the_dtype(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.0, 2.0, 1.0], [-3.0, -5.0, -4.0], [0.0, -1.0, -1.0]], dtype=dtype)
    dead = torch.full((1, 3), -torch.inf, dtype=dtype)
    logits = torch.cat([rows, dead])
    changed = near_tie({"target_logits": logits, "n": 1})["target_logits"]
    assert changed.float().argmax(-1).tolist()[:3] == [2, 1, 1]
    for row, column in ((0, 2), (1, 1), (2, 1)):
        up = torch.nextafter(rows[row].max(), torch.tensor(torch.inf, dtype=dtype))
        assert changed[row, column] == up
    assert torch.equal(changed[3], dead[0])
    assert torch.equal(logits[:3], rows), "the arguments given stay as they are"


def test_near_ties_of_a_mixed_batch_are_in_its_greedy_rows() -> None:
    logits = torch.eye(4)
    values = {"target_logits": logits, "target_temperatures": torch.tensor([0.7, 0.0])}
    changed = near_tie(values)["target_logits"]
    assert (changed != logits).any(-1).tolist() == [False, False, True, True]


def test_ranges_hold_for_every_output() -> None:
    values = accept_cases.arguments(torch.zeros(6, 5), torch.zeros(2, 3, dtype=torch.int64))
    assert range_problems("greedy_accept", values) == []
    values["out_correct_lens"][1] = 3
    values["out_bonus_tokens"][0] = 5
    values["out_commit_lens"][0] = -1
    values["out_tokens"][1, 2] = -1
    assert range_problems("greedy_accept", values) == [
        "out_correct_lens[1]: found 3, allowed 0 to 2",
        "out_bonus_tokens[0]: found 5, allowed 0 to 4",
        "out_commit_lens[0]: found -1, allowed 0 to 3",
        "out_tokens[1, 2]: found -1, allowed 0 to 4",
    ]
