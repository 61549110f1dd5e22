"""Arguments of every kind in the kit: None, lists, bool and 8-bit outputs, outputs that are read too, aliases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.conformance.arguments import blank, copy_of, load, near_tie, poison, relocated, tensors, trespasses
from sgl_mega_plugin.conformance.compare import difference
from sgl_mega_plugin.conformance.runner import conform
from sgl_mega_plugin.contract import Backend, Case, Provided, Slot, SlotSetup, Stage
from sgl_mega_plugin.registry import Registry
from sgl_mega_slots.commit.context_kv import cases as context_cases
from sgl_mega_slots.commit.deferred_kv.cases import staged
from sgl_mega_slots.commit.deferred_kv.reference import staged_kv
from sgl_mega_slots.commit.histories import cases as history_cases
from sgl_mega_slots.commit.histories.reference import history_commit
from sgl_mega_slots.verify_accept.accept_tail import cases as accept_cases

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def mixed() -> dict[str, Any]:
    """Every kind of argument that a seam has."""
    pool = torch.arange(24.0).view(2, 3, 4)
    return {
        "x": pool[0, :, 1:3],
        "none": None,
        "flag": True,
        "number": 1.5,
        "many": (torch.arange(3), torch.arange(2)),
        "out_none": None,
        "out_lists": [pool[1, :2], pool[1, 2:]],
        "out_bools": torch.zeros(2, 3, dtype=torch.bool)[:, :2],
        "out_e4m3": torch.ones(4).to(E4M3),
        "out_e5m2": torch.ones(4).to(E5M2),
        "out_ids": torch.arange(4),
    }


@pytest.mark.parametrize("made", [copy_of, relocated, blank], ids=lambda made: made.__name__)
def test_copies_have_the_same_arguments(made: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    values = mixed()
    found = made(values)
    assert list(found) == list(values)
    assert [found[name] for name in ("none", "flag", "number", "out_none")] == [None, True, 1.5, None]
    for (label, old), (same, new) in zip(tensors(values), tensors(found), strict=True):
        assert label == same
        assert (old.dtype, old.shape, old.stride()) == (new.dtype, new.shape, new.stride()), label
        wanted = torch.zeros_like(old) if made is blank else old
        assert torch.equal(new.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)), label
    load(found, made(values))


def test_poison_is_no_value_of_any_dtype() -> None:
    values = mixed()
    before = copy_of(values)
    poison(values, frozenset())
    assert trespasses(values, before) == []
    for label, tensor in tensors(values, outputs=True):
        if tensor.is_floating_point():
            assert bool(tensor.float().isnan().all()), label
        elif tensor.dtype is torch.bool:
            assert set(tensor.view(torch.uint8).flatten().tolist()).isdisjoint({0, 1}), label
        else:
            assert set(tensor.tolist()) == {2**31 - 1}, label


def test_poison_spares_an_input_that_is_an_output() -> None:
    lens, pool = torch.arange(4), torch.arange(6)
    values = {"lens": lens, "window": pool[:4], "out_lens": lens, "out_window": pool[2:], "out_rest": torch.arange(2)}
    poison(values, frozenset())
    assert lens.tolist() == [0, 1, 2, 3]
    assert pool.tolist() == [0, 1, 2, 3, 2**31 - 1, 2**31 - 1]
    assert values["out_rest"].tolist() == [2**31 - 1] * 2


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    ("found", "expected", "bound", "where"),
    [
        pytest.param([1, NAN, 0], [1, NAN, 0], 0.0, None, id="equal"),
        pytest.param([1, 0], [1, NAN], 0.0, 1, id="nan"),
        pytest.param([-0.0], [0.0], 0.0, 0, id="sign-of-zero"),
        pytest.param([1, 1.25], [1, 1.0], 0.0, 1, id="a-step"),
        pytest.param([1, 1.25], [1, 1.0], 0.3, None, id="a-step-in-the-bound"),
        pytest.param([1, 1.5], [1, 1.0], 0.3, 1, id="two-steps"),
        pytest.param([1, NAN], [1, NAN], 0.3, None, id="nan-in-the-bound"),
    ],
)
def test_differences_of_8_bit_floats(
    dtype: torch.dtype, found: list[float], expected: list[float], bound: float, where: int | None
) -> None:
    line = difference("out_x", torch.tensor(found).to(dtype), torch.tensor(expected).to(dtype), bound)
    assert line is None if where is None else str(line).startswith(f"out_x[{where}]: found {found[where]}")


def test_a_bool_that_was_not_written_differs_from_both() -> None:
    values = {"out_x": torch.zeros(2, dtype=torch.bool)}
    poison(values, frozenset())
    for wanted in (torch.tensor([True, False]), torch.tensor([False, True])):
        assert str(difference("out_x", values["out_x"], wanted, 0.0)).endswith("2 of 2 differ")
    assert difference("out_x", torch.tensor([True, False]), torch.tensor([True, False]), 0.0) is None


def test_no_target_logits_no_near_tie() -> None:
    values = accept_cases.arguments(torch.randn(6, 5), torch.zeros(2, 3, dtype=torch.int64))
    values |= {"target_logits": None, "target_tokens": torch.zeros(2, 3, dtype=torch.int64)}
    changed = near_tie(values)
    assert changed["target_logits"] is None
    for (label, old), (_, new) in zip(tensors(values), tensors(changed), strict=True):
        assert torch.equal(old, new), label


class Staged:
    """`deferred_kv` in torch; a subclass leaves something out. Reads by the host are no matter here."""

    def __init__(self, setup: SlotSetup) -> None:
        self.setup = setup

    def __call__(
        self,
        *,
        projected_kv: Tensor,
        k_norm_weights: Tensor,
        cos_sin: Tensor,
        neox: bool,
        positions: Tensor,
        cache_locs: Tensor,
        location_map: Tensor | None,
        ring_rows: Tensor | None,
        ring_size: int,
        eps: float,
        kv_scales: Tensor | None,
        out_commit_lens: Tensor,
        out_keys: Sequence[Tensor],
        out_values: Sequence[Tensor],
    ) -> None:
        values = {name: value for name, value in locals().items() if name != "self"}
        kept = out_commit_lens.clone()
        self.write(values)
        self.disarm(out_commit_lens, kept)

    def write(self, values: dict[str, Any]) -> None:
        staged_kv(**values)

    def disarm(self, commit_lens: Tensor, kept: Tensor) -> None: ...


class StaysArmed(Staged):
    def disarm(self, commit_lens: Tensor, kept: Tensor) -> None:
        commit_lens.copy_(kept)


class OnlyDisarms(Staged):
    def write(self, values: dict[str, Any]) -> None:
        values["out_commit_lens"].zero_()


def staged_case() -> Iterator[Case]:
    yield Case(
        "two_rows",
        lambda device: staged(context_cases.arguments(device, locations=[[5, 6], [7, 8]], commit_lens=[2, 1])),
        keep=frozenset({"out_commit_lens", "out_keys", "out_values"}),
    )


class Advances:
    """`histories` in torch; whole rows move, so nothing is read by the host."""

    def __init__(self, setup: SlotSetup) -> None:
        self.setup = setup

    def __call__(self, *, tokens: Tensor, req_pool_indices: Tensor, commit_lens: Tensor, out_histories: Tensor) -> None:
        size, owners = out_histories.shape[1], req_pool_indices.long()
        joined = torch.cat([out_histories[owners], tokens.to(out_histories.dtype)], dim=1)
        columns = commit_lens.long().unsqueeze(1) + torch.arange(size)
        out_histories.index_copy_(0, owners, joined.gather(1, columns))


def history_case() -> Iterator[Case]:
    yield Case(
        "two_rows",
        lambda device: history_cases.arguments(device, commit_lens=[1, 2], rows=3, ids=3),
        keep=frozenset({"out_histories"}),
    )


def _failures(implementation: type, seam: str, reference: str, cases: Callable[[], Iterator[Case]]) -> list[str]:
    slot = Slot(
        name="made_up",
        stage=Stage.COMMIT,
        seam=seam,
        summary="reads what it writes",
        implementation=f"{__name__}:{implementation.__name__}",
        reference=reference,
        cases=f"{__name__}:{cases.__name__}",
    )
    registry = Registry.of([Provided(slot=slot, distribution="made-up", version="1")])
    (result,) = conform(registry, backend=Backend.INTERPRETER).slots
    return [line for failure in result.failures for line in failure.detail if "host read" not in line]


_STAGED = ("staged_kv", f"{staged_kv.__module__}:staged_kv", staged_case)


def test_what_a_slot_reads_and_writes_is_there_anew_for_each_run() -> None:
    assert _failures(Advances, "history_commit", f"{history_commit.__module__}:history_commit", history_case) == []


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        (StaysArmed, "first call: out_commit_lens[0]: found 2, expected 0, bit for bit; 2 of 2 differ"),
        (OnlyDisarms, "first call: out_keys[0][5, 0, 0]: found "),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_staging_is_written_and_disarmed(fault: type, detail: str) -> None:
    assert any(line.startswith(detail) for line in _failures(fault, *_STAGED))
