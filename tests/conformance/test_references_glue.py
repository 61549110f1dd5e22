"""The glue stage's references against right values written out by hand, naive twins, and steps in a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sgl_mega_plugin.conformance.arguments import poison
from sgl_mega_plugin.conformance.compare import difference
from sgl_mega_slots.glue.attn_metadata import cases as metadata_cases
from sgl_mega_slots.glue.attn_metadata.reference import attention_metadata
from sgl_mega_slots.glue.params_once import cases as params_cases
from sgl_mega_slots.glue.params_once.reference import step_params
from sgl_mega_slots.glue.relay import cases as relay_cases
from sgl_mega_slots.glue.relay.reference import relay
from sgl_mega_slots.glue.step_inputs import cases as step_cases
from sgl_mega_slots.glue.step_inputs.reference import step_inputs

_OLD = metadata_cases.OLD
_ALL = params_cases.ALL


def _outputs(values: dict[str, Any]) -> dict[str, Any]:
    return {name[4:]: value.tolist() for name, value in values.items() if name.startswith("out_") and value is not None}


def _metadata(**kwargs: Any) -> dict[str, Any]:
    values = metadata_cases.arguments("cpu", **kwargs)
    attention_metadata(**values)
    return _outputs(values)


def _numbered(rows: int, columns: int) -> Tensor:
    """Every entry names its row and column."""
    return (torch.arange(rows)[:, None] * 1000 + torch.arange(columns) + 1).int()


def test_page_tables_of_flash_attention() -> None:
    """Page 4, T 2: lengths with the step's rows, whole pages, the sliding window's from the map."""
    table = torch.tensor([[0] * 12, [40, 41, 42, 43, 8, 9, 10, 11, 20, 21, 22, 23], [28, 29, 30, 31] + [0] * 8]).int()
    values = metadata_cases.arguments(
        "cpu", seq_lens=[5, 1], pool=[1, 2], query_rows=2, page_size=4, table=table, outputs=metadata_cases.PAGES
    )
    values["location_map"] = torch.arange(64) + 4
    attention_metadata(**values)
    found = _outputs(values)
    assert (found["kv_lens"], found["kv_indptr"]) == ([7, 3], [0, 7, 10])
    assert found["page_table"] == [[10, 2, _OLD], [7, _OLD, _OLD]]
    assert found["window_page_table"] == [[11, 3, _OLD], [8, _OLD, _OLD]]


def test_slot_lists_of_triton() -> None:
    """T 3, window 4: the prefix alone, and its last four tokens."""
    found = _metadata(
        seq_lens=[6, 2], pool=[1, 0], query_rows=3, kv_rows=0, window=4, room=10, window_room=7, table=_numbered(2, 9),
        outputs=(*metadata_cases.LENGTHS, *metadata_cases.INDICES, *metadata_cases.WINDOW_INDICES),
    )  # fmt: skip
    assert (found["kv_lens"], found["kv_indptr"], found["qo_indptr"]) == ([6, 2], [0, 6, 8], [0, 3, 6])
    assert found["mask_indptr"] == [0, 3 * 9, 3 * 9 + 3 * 5]
    assert found["kv_indices"] == [1001, 1002, 1003, 1004, 1005, 1006, 1, 2, _OLD, _OLD]
    assert (found["window_kv_indptr"], found["window_kv_offsets"]) == ([0, 4, 6], [2, 0])
    assert found["window_kv_indices"] == [1003, 1004, 1005, 1006, 1, 2, _OLD]


def test_slot_lists_of_flashinfer() -> None:
    """The step's two rows are read too, and a window is so much longer."""
    found = _metadata(
        seq_lens=[6], pool=[0], query_rows=2, window=3, room=9, window_room=6, table=_numbered(1, 9),
        outputs=(*metadata_cases.INDICES, *metadata_cases.WINDOW_INDICES),
    )  # fmt: skip
    assert found["kv_indices"] == [1, 2, 3, 4, 5, 6, 7, 8, _OLD]
    assert (found["window_kv_indptr"], found["window_kv_offsets"]) == ([0, 5], [3])
    assert found["window_kv_indices"] == [4, 5, 6, 7, 8, _OLD]


@pytest.mark.parametrize("columns", [64, 76], ids=["context-columns", "engine-columns"])
def test_metadata_at_the_end_of_the_context(columns: int) -> None:
    """Context 64, page 1, T 8: nothing beyond a request's row, and all of it where the row has the columns."""
    committed = [60, 61, 63, 64]
    found = _metadata(
        seq_lens=committed, pool=[0, 1, 2, 3], columns=columns, table=_numbered(5, columns),
        outputs=("out_page_table", "out_kv_indices"),
    )  # fmt: skip
    lengths = [min(length + 8, columns) for length in committed]
    assert found["kv_lens"] == lengths
    for b, length in enumerate(lengths):
        slots = [b * 1000 + t + 1 for t in range(length)]
        assert found["page_table"][b] == slots + [_OLD] * (columns - length)
        assert found["kv_indices"][sum(lengths[:b]) : sum(lengths[: b + 1])] == slots
    assert set(found["kv_indices"][sum(lengths) :]) <= {_OLD}


def test_metadata_at_the_end_of_the_context_with_large_pages() -> None:
    """Page 256, context 256: the length is cut where the page table ends, not where a page does."""
    for pages, lengths in ((1, [256, 256]), (2, [260, 264])):
        found = _metadata(seq_lens=[252, 256], columns=512, page_size=256, pages=pages, outputs=("out_page_table",))
        assert found["kv_lens"] == lengths
        assert _OLD not in found["page_table"][0]


def test_step_inputs_at_the_end_of_the_context() -> None:
    """Context 64, page 1, T 8, with the 4 + T columns that an engine adds: what is past the context is not written."""
    table_columns = 64 + 4 + 8
    values = step_cases.arguments("cpu", seq_lens=[60, 61, 63, 64], gamma=7, columns=table_columns, max_positions=64)
    step_inputs(**values)
    for b, length in enumerate([60, 61, 63, 64]):
        inside = max(0, 64 - length)
        assert values["out_positions"][b].tolist() == [*range(length, 64), *[63] * (8 - inside)]
        assert values["out_cache_locs"][b, inside:].tolist() == [0] * (8 - inside)
        assert all(location % 1000 <= 64 for location in values["out_cache_locs"][b].tolist())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_metadata_against_a_loop(data: st.DataObject) -> None:
    def number(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    batch, rows, columns, window = number(1, 4), number(1, 4), number(1, 20), number(1, 12)
    page_size, pages = data.draw(st.sampled_from([1, 2, 4])), number(1, 12)
    kv_rows, room, window_room = data.draw(st.sampled_from([0, rows])), number(0, 50), number(0, 50)
    lengths, pool = [number(-1, 24) for _ in range(batch)], [number(-1, batch + 2) for _ in range(batch)]
    verify = [number(0, rows) for _ in range(batch)]
    found = _metadata(
        seq_lens=lengths, pool=pool, verify_lens=verify, query_rows=rows, kv_rows=kv_rows, page_size=page_size,
        pages=pages, window=window, room=room, window_room=window_room, table=_numbered(batch + 2, columns),
        outputs=metadata_cases.OPTIONAL,
    )  # fmt: skip
    limit, at, window_at, masked = min(columns, pages * page_size), 0, 0, 0
    kv, window_kv = [_OLD] * room, [_OLD] * window_room
    for b in range(batch):
        live = verify[b] > 0 and 0 <= pool[b] < batch + 2
        prefix = min(max(lengths[b], 0), limit) if live else 0
        whole = min(prefix + kv_rows, limit) if live else 0
        slots = [pool[b] * 1000 + t + 1 for t in range(whole)]
        fits = slots[: room - at]
        seen = slots[max(prefix - window, 0) :][: window_room - window_at]
        kv[at : at + len(fits)] = fits
        window_kv[window_at : window_at + len(seen)] = seen
        starts = [found[name][b] for name in ("kv_indptr", "window_kv_indptr", "mask_indptr", "qo_indptr")]
        assert starts == [at, window_at, masked, b * rows]
        assert (found["kv_lens"][b], found["window_kv_offsets"][b]) == (len(fits), max(prefix - window, 0))
        firsts = [slot // page_size for slot in fits[::page_size]] if live else [0]
        assert found["page_table"][b] == firsts + [_OLD] * (pages - len(firsts))
        at, window_at = at + len(fits), window_at + len(seen)
        masked += rows * (prefix + rows)
    assert [found[name][batch] for name in ("kv_indptr", "window_kv_indptr", "mask_indptr")] == [at, window_at, masked]
    assert (found["kv_indices"], found["window_kv_indices"]) == (kv, window_kv)


def test_which_rows_are_greedy() -> None:
    """Temperature 0; .7 with top_k 1; .7."""
    values = params_cases.arguments("cpu", temperatures=[0.0, 0.7, 0.7], top_ks=[_ALL, 1, _ALL], column=True)
    step_params(**values)
    assert values["out_greedy"].tolist() == [True, True, False]
    assert torch.equal(values["out_step_temperatures"], torch.tensor([0.0, 0.0, 0.7]))
    assert torch.equal(values["out_temperatures"], torch.tensor([1e-5, 0.7, 0.7]))


def test_temperatures_that_are_none() -> None:
    odd = [float("nan"), -1.0, float("-inf"), float("inf"), 1e-6]
    values = params_cases.arguments("cpu", temperatures=odd, top_ks=[_ALL] * 5)
    step_params(**values)
    smallest = float(torch.tensor(1e-5))
    assert values["out_greedy"].tolist() == [True, True, True, False, False]
    assert values["out_step_temperatures"].tolist() == [0.0, 0.0, 0.0, float("inf"), smallest]
    assert values["out_temperatures"].tolist() == [smallest, smallest, smallest, float("inf"), smallest]


def test_a_smaller_batch_leaves_nothing_of_a_larger_one() -> None:
    """Four rows, then one in place in the same rows: row 0 is a batch of one, the others are greedy padding."""
    values = params_cases.arguments(
        "cpu", temperatures=[0.3, 0.6, 0.9, 1.2], top_ks=[_ALL, _ALL, 1, _ALL], verify_lens=[4] * 4
    )
    step_params(**values)
    assert torch.equal(values["out_step_temperatures"], torch.tensor([0.3, 0.6, 0.0, 1.2]))
    values["temperatures"][0] = 0.7
    values["verify_lens"][1:] = 0
    step_params(**values)
    assert torch.equal(values["out_step_temperatures"], torch.tensor([0.7, 0.0, 0.0, 0.0]))
    assert values["out_greedy"].tolist() == [False, True, True, True]
    assert torch.equal(values["out_temperatures"], torch.tensor([0.7, 1.0, 1.0, 1.0]))


def test_relay_writes_the_rows_of_live_requests_only() -> None:
    """Padding names a live request's row, and rows that no table has."""
    values = relay_cases.arguments(
        "cpu", pool=[2, 4, 2, 7, -1], lens=[11, 12, 13, 14, 15], verify_lens=[4, 1, 0, 0, 4], pool_rows=6
    )
    relay(**values)
    found = _outputs(values)
    assert found["relay_lens"] == [1000, 1001, 11, 1003, 12, 1005]
    assert found["relay_tokens"] == [2000, 2001, 5, 2003, 18, 2005]
    assert found["next_seq_lens"] == [11, 12, 0, 0, 15]
    assert found["next_anchors"] == [5, 18, 0, 0, 57]


class _Server:
    """Steps of changing batches on static rows of four; the host says which requests sit where, and nothing else."""

    def __init__(self) -> None:
        self.lens, self.tokens = torch.full((8,), -(1 << 40)), torch.full((8,), -9)
        self.next_lens, self.next_anchors = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)

    def prefill(self, row: int, length: int, token: int) -> None:
        self._relay([row], [1], [length], [token])

    def step(self, rows: list[int], commits: list[int], *, steady: bool = False) -> dict[str, Any]:
        """One step: inputs from the relay, then an accept of these lengths whose bonus is the length itself."""
        values = step_cases.arguments("cpu", seq_lens=[-7] * 4, gamma=2, pool=rows + [rows[0]] * (4 - len(rows)))
        live = [3] * len(rows) + [0] * (4 - len(rows))
        used = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        values |= {"verify_lens": torch.tensor(live).int(), "out_seq_lens": used[0], "out_anchor_tokens": used[1]}
        if steady:
            values |= {"seq_lens": self.next_lens.clone(), "anchor_tokens": self.next_anchors.clone()}
        else:
            values |= {"relay_lens": self.lens, "relay_tokens": self.tokens}
        values["req_to_token"] = _numbered(8, 64)
        step_inputs(**values)
        new_lens = used[0] + torch.tensor(commits + [0] * (4 - len(rows)))
        self._relay(values["req_pool_indices"].tolist(), live, new_lens.tolist(), (new_lens * 10).tolist())
        return _outputs(values)

    def _relay(self, rows: list[int], live: list[int], lens: list[int], tokens: list[int]) -> None:
        following = len(rows) == 4
        relay(
            req_pool_indices=torch.tensor(rows),
            verify_lens=torch.tensor(live).int(),
            new_seq_lens=torch.tensor(lens),
            bonus_tokens=torch.tensor(tokens),
            out_relay_lens=self.lens,
            out_relay_tokens=self.tokens,
            out_next_seq_lens=self.next_lens if following else None,
            out_next_anchors=self.next_anchors if following else None,
        )


def test_a_request_keeps_its_length_and_anchor_from_batch_to_batch() -> None:
    """Requests join, leave, change places and reuse rows; each step has what a serial run of the request has."""
    server, length, anchor = _Server(), {}, {}
    plan: list[tuple[dict[int, int], list[int], list[int]]] = [
        ({1: 5, 2: 9}, [1, 2], [1, 3]),
        ({3: 4}, [3, 1, 2], [2, 1, 1]),
        ({}, [2, 3], [3, 1]),
        ({1: 2}, [1, 3, 2], [1, 2, 3]),  # row 1 has a new owner, shorter than the last
        ({}, [1, 3, 2], [3, 3, 1]),
    ]
    for arrivals, rows, commits in plan:
        for row, prompt in arrivals.items():
            length[row], anchor[row] = prompt, 100 + row
            server.prefill(row, prompt, 100 + row)
        found = server.step(rows, commits)
        assert found["seq_lens"] == [length[row] for row in rows] + [0] * (4 - len(rows))
        assert found["anchor_tokens"] == [anchor[row] for row in rows] + [0] * (4 - len(rows))
        for b, (row, commit) in enumerate(zip(rows, commits, strict=True)):
            assert found["positions"][b] == [length[row], length[row] + 1, length[row] + 2]
            assert found["cache_locs"][b] == [row * 1000 + position + 1 for position in found["positions"][b]]
            assert found["draft_ids"][b][0] == anchor[row]
            length[row] += commit
            anchor[row] = length[row] * 10
        assert found["cache_locs"][len(rows) :] == [[0, 0, 0]] * (4 - len(rows))


def test_the_same_batch_goes_on_from_its_own_rows() -> None:
    """Next rows and relay tables say the same: a steady step needs neither the host nor a gather."""
    steady, gathered = _Server(), _Server()
    for server in (steady, gathered):
        for row in (1, 2, 3):
            server.prefill(row, 4 * row, 50 + row)
        server.step([3, 1, 2], [1, 2, 3])
    for commits in ([2, 2, 1], [1, 3, 3]):
        one, other = steady.step([3, 1, 2], commits, steady=True), gathered.step([3, 1, 2], commits)
        assert one == other
        assert torch.equal(steady.lens, gathered.lens)
        assert torch.equal(steady.tokens, gathered.tokens)


def test_the_host_fills_the_next_step_before_this_one_has_lengths() -> None:
    """Step N + 1's rows are filled while N has yet to relay, and hold no length: N + 1 finds N's all the same."""
    rows, verify_lens = torch.tensor([1, 2]), torch.tensor([3, 3]).int()
    own = {"req_pool_indices": rows.clone(), "verify_lens": verify_lens.clone()}
    rows.copy_(torch.tensor([2, 5]))
    verify_lens.copy_(torch.tensor([3, 0]))
    lens, tokens = torch.full((6,), -1), torch.full((6,), -1)
    relay(
        **own, new_seq_lens=torch.tensor([8, 9]), bonus_tokens=torch.tensor([80, 90]), out_relay_lens=lens,
        out_relay_tokens=tokens, out_next_seq_lens=None, out_next_anchors=None,
    )  # fmt: skip
    values = step_cases.arguments("cpu", seq_lens=[0, 0], gamma=2, pool=[0, 0], used=True) | {
        "req_pool_indices": rows, "verify_lens": verify_lens, "relay_lens": lens, "relay_tokens": tokens,
        "req_to_token": _numbered(6, 64),
    }  # fmt: skip
    step_inputs(**values)
    assert values["out_seq_lens"].tolist() == [9, 0]
    assert values["out_anchor_tokens"].tolist() == [90, 0]


def test_a_flag_that_was_not_written_is_seen() -> None:
    """A poisoned bool is neither true nor false, so the kit tells it from either."""
    for expected in (True, False):
        flags = {"out_greedy": torch.zeros(3, dtype=torch.bool)}
        poison(flags, frozenset())
        assert difference("out_greedy", flags["out_greedy"], torch.full((3,), expected), 0.0) is not None
