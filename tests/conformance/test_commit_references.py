"""The commit stage's references against right values written out by hand, and against naive twins."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sgl_mega_slots.commit.context_kv import cases as context_cases
from sgl_mega_slots.commit.context_kv.reference import context_kv, rope, store
from sgl_mega_slots.commit.deferred_kv import cases as deferred_cases
from sgl_mega_slots.commit.deferred_kv.reference import staged_kv
from sgl_mega_slots.commit.histories.reference import history_commit
from sgl_mega_slots.commit.kv_staging import cases as staging_cases
from sgl_mega_slots.commit.kv_staging.reference import kv_staging

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SLOTS = 40


def _written(**kwargs: Any) -> dict[int, int]:
    """Slot of every row t of request b that is written, as {slot: b * T + t}; V holds the row's number."""
    values = context_cases.arguments("cpu", layers=1, heads=1, size=4, dtype=torch.float32, slots=_SLOTS, **kwargs)
    values["projected_kv"][:, 0, 1] = torch.arange(len(values["projected_kv"]))[:, None, None]
    values["out_values"][0].fill_(-1.0)
    untouched = values["out_keys"][0].clone()
    context_kv(**values)
    tags = values["out_values"][0][:, 0, 0].tolist()
    slots = {slot: int(tag) for slot, tag in enumerate(tags) if tag >= 0}
    rest = [slot for slot in range(_SLOTS) if slot not in slots]
    assert torch.equal(values["out_keys"][0][rest], untouched[rest])
    return slots


@pytest.mark.parametrize("padding", [[0, 0], [-1, 9_999_999]], ids=["the padding slot", "no address"])
def test_padding_rows_write_nothing_and_are_not_read(padding: list[int]) -> None:
    """Two requests, one live: the padding row's hidden state is NaN, its places are none."""
    values = context_cases.arguments("cpu", locations=[[5, 6], padding], commit_lens=[2, 0])
    values["projected_kv"][2:] = math.nan
    before = [buffer.clone() for buffer in values["out_keys"] + values["out_values"]]
    context_kv(**values)
    for old, new in zip(before, values["out_keys"] + values["out_values"], strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [5, 6]
        assert not new.isnan().any()


def test_a_stop_inside_the_block_commits_the_whole_length_and_nothing_behind_it() -> None:
    """The first of three accepted tokens ends the text: the device commits all, the host trims. What lies behind the
    bonus is never read."""
    values = context_cases.arguments("cpu", locations=[[5, 6, 7, 8]], commit_lens=[3])
    values["projected_kv"][3:] = math.nan
    values["cache_locs"][0, 3], values["positions"][0, 3] = 0x7FFFFFFF, -(1 << 40)
    context_kv(**values)
    assert all(buffer.isfinite().all() for buffer in values["out_keys"] + values["out_values"])
    tokens = torch.tensor([[9, 1, 4, -77]])  # an end of text, here 1, is a token like any other
    history = torch.tensor([[0, 0, 0], [5, 6, 7]], dtype=torch.int32)
    history_commit(
        tokens=tokens, req_pool_indices=torch.tensor([1]), commit_lens=torch.tensor([3]).int(), out_histories=history
    )
    assert history.tolist() == [[0, 0, 0], [9, 1, 4]]


def test_a_reused_slot_holds_nothing_of_its_last_owner() -> None:
    """Slots that are poisoned before a shorter request gets them: what it committed is finite, the rest is not its."""
    values = context_cases.arguments("cpu", locations=[[5, 6, 7]], commit_lens=[2])
    fresh = context_cases.arguments("cpu", locations=[[5, 6, 7]], commit_lens=[2])
    for buffer in values["out_keys"] + values["out_values"]:
        buffer.fill_(math.nan)
    context_kv(**values)
    context_kv(**fresh)
    for name in ("out_keys", "out_values"):
        for poisoned, clean in zip(values[name], fresh[name], strict=True):
            assert torch.equal(poisoned[5:7], clean[5:7])
            assert poisoned[7].isnan().all()


@pytest.mark.parametrize(
    ("kwargs", "slots"),
    [
        pytest.param({"locations": [[5, 6, 7]], "commit_lens": [2]}, {5: 0, 6: 1}, id="slots"),
        pytest.param(
            {"locations": [[1, 2, 3, 4]], "commit_lens": [4], "location_map": torch.tensor([0, 9, 0, -1, 40])},
            {9: 0},
            id="map to the padding slot, to none and past the pool",
        ),
        pytest.param(
            {"locations": [[5, -1, 0, 1]], "commit_lens": [4], "location_map": torch.tensor([7, 9, -1, 30, -1])},
            {9: 3},
            id="past the map, negative, padding",
        ),
        pytest.param(
            {"locations": [[90, 91, 92, 93]], "commit_lens": [3], "ring_rows": [2], "ring_size": 8,
             "positions": [[14, 15, 16, 17]]},
            {22: 0, 23: 1, 16: 2},
            id="ring",
        ),
        pytest.param(
            {"locations": [[90, 91, 92, 93]], "commit_lens": [4], "ring_rows": [5], "ring_size": 3},
            {16: 1, 17: 2, 15: 3},
            id="a commit longer than the ring keeps its last rows",
        ),
        pytest.param(
            {"locations": [[90, 91, 92, 93]], "commit_lens": [2], "ring_rows": [5], "ring_size": 3},
            {15: 0, 16: 1},
            id="a commit that fits",
        ),
        pytest.param(
            {"locations": [[9, 9]] * 3, "commit_lens": [2] * 3, "ring_rows": [0, 20, -1], "ring_size": 4},
            {},
            id="ring of the padding, past the pool, negative",
        ),
        pytest.param(
            {"locations": [[0, 9], [-1, 9]], "commit_lens": [2, 2], "ring_rows": [1, 2], "ring_size": 8},
            {12: 1, 20: 3},
            id="a ring's rows need a location",
        ),
    ],
)  # fmt: skip
def test_where_a_row_goes(kwargs: dict[str, Any], slots: dict[int, int]) -> None:
    assert _written(**kwargs) == slots


@pytest.mark.parametrize(
    ("dtype", "value", "held"),
    [
        (_E4M3, 448.0, 448.0),
        (_E4M3, 1e6, 448.0),
        (_E4M3, -math.inf, -448.0),
        (_E4M3, 17.0, 16.0),  # half way between 16 and 18: to the even one
        (_E4M3, 19.0, 20.0),
        (_E4M3, 2.0**-10, 0.0),  # half of the smallest number
        (_E4M3, 3 * 2.0**-10, 2.0**-8),
        (_E5M2, 57344.0, 57344.0),
        (_E5M2, 61439.0, 57344.0),
        (_E5M2, 61440.0, math.inf),
        (_E5M2, -math.inf, -math.inf),
        (_E5M2, 2.0**-17, 0.0),
        (_E5M2, 3 * 2.0**-17, 2.0**-15),
    ],
)
def test_what_an_fp8_cache_holds(dtype: torch.dtype, value: float, held: float) -> None:
    buffer = torch.ones(2, 1, 2).to(dtype)
    store(buffer, torch.tensor([1]), torch.tensor([[[value, math.nan]]]), None)
    assert buffer[1, 0, 0].float().item() == held
    assert buffer[1, 0, 1].float().isnan()
    assert buffer[0].float().eq(1.0).all()


def test_a_quotient_is_rounded_to_the_models_dtype_first() -> None:
    """18.999 / 1 in bf16 is 19, half way between 18 and 20 and so 20; in fp32 it would be 18."""
    rows, scale = torch.tensor([[[56.997, 0.0]]]), torch.tensor(3.0)
    held = []
    for dtype in (torch.bfloat16, torch.float32):
        buffer = torch.zeros(2, 1, 2).to(_E4M3)
        store(buffer, torch.tensor([1]), rows.to(dtype), scale)
        held.append(buffer[1, 0, 0].float().item())
    assert held == [20.0, 18.0]


def _turned(key: list[float], table: list[float], pairs: list[tuple[int, int]]) -> list[float]:
    """Complex multiplication, pair by pair."""
    out, half = list(key), len(table) // 2
    for (low, high), cos, sin in zip(pairs, table[:half], table[half:], strict=True):
        turned = complex(key[low], key[high]) * complex(cos, sin)
        out[low], out[high] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("rotated", [2, 4, 6, 8])
@pytest.mark.parametrize("neox", [True, False])
def test_rope_of_a_part_of_a_head(rotated: int, neox: bool) -> None:
    half = rotated // 2
    key = [0.5, -1.5, 2.0, 0.25, 3.0, -0.75, 1.0, 4.0]
    table = [0.5 + i for i in range(rotated)]
    pairs = [(i, i + half) if neox else (2 * i, 2 * i + 1) for i in range(half)]
    found = rope(torch.tensor([[key]]), torch.tensor([table]), neox=neox)
    assert found[0, 0].tolist() == _turned(key, table, pairs)  # eighths: exact


def test_a_staging_is_written_once() -> None:
    values = deferred_cases.staged(context_cases.arguments("cpu", locations=[[5, 6], [7, 8]], commit_lens=[2, 1]))
    staged_kv(**values)
    written = [buffer.clone() for buffer in values["out_keys"]]
    assert values["out_commit_lens"].tolist() == [0, 0]
    values["projected_kv"].fill_(math.nan)
    staged_kv(**values)
    assert all(torch.equal(now, then) for now, then in zip(values["out_keys"], written, strict=True))


def test_a_smaller_staging_leaves_nothing_of_a_larger_one() -> None:
    values = staging_cases.arguments("cpu", locations=[[10, 11, 12], [20, 21, 22]], commit_lens=[2, 1], staged=4)
    for name in ("out_cache_locs", "out_positions", "out_commit_lens"):
        values[name].fill_(0x7FFFFFFF)
    kv_staging(**values)
    assert values["out_cache_locs"].tolist() == [[10, 11, 12], [20, 21, 22], [0] * 3, [0] * 3]
    assert values["out_positions"].tolist() == [[1, 4, 7], [10, 13, 16], [0] * 3, [0] * 3]
    assert values["out_commit_lens"].tolist() == [2, 1, 0, 0]


@settings(deadline=None)
@given(st.data())
def test_a_history_is_the_end_of_all_that_was_committed(data: st.DataObject) -> None:
    """Several steps on a table, against lists that only ever grow."""
    ids, rows, batch = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    table = torch.zeros(5, ids, dtype=torch.int32)
    said: list[list[int]] = [[0] * ids for _ in range(5)]
    token = st.integers(1, 99)
    for _ in range(data.draw(st.integers(1, 4))):
        owners = data.draw(st.permutations(range(5)))[:batch]
        tokens = data.draw(st.lists(st.lists(token, min_size=rows, max_size=rows), min_size=batch, max_size=batch))
        commits = data.draw(st.lists(st.integers(0, rows), min_size=batch, max_size=batch))
        for owner, new, commit in zip(owners, tokens, commits, strict=True):
            said[owner] += new[:commit]
        pool: Tensor = torch.tensor([owner if commit else -1 for owner, commit in zip(owners, commits, strict=True)])
        history_commit(
            tokens=torch.tensor(tokens),
            req_pool_indices=pool,
            commit_lens=torch.tensor(commits, dtype=torch.int32),
            out_histories=table,
        )
        assert table.tolist() == [all_of[-ids:] for all_of in said]
