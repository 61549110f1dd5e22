"""A deferred commit on a small model of memory: the host's rules with the references of `kv_staging`, `deferred_kv`.

Every committed token is written exactly once before anything reads it, nothing is written after a drop, and what
another owner put into a slot survives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sgl_mega_plugin.deferral import Deferral, Todo
from sgl_mega_slots.commit.deferred_kv.reference import staged_kv
from sgl_mega_slots.commit.kv_staging.reference import kv_staging

_SLOTS, _POSITIONS, _ROWS = 96, 64, 3
_SENTINEL = -1.0


class Memory:
    """One layer whose values are tags, and the persistent buffers of a deferred commit."""

    def __init__(self, staged_rows: int) -> None:
        self.keys = torch.zeros(_SLOTS, 1, 2)
        self.values = torch.zeros(_SLOTS, 1, 2)
        self.projected = torch.zeros(staged_rows * _ROWS, 1, 2, 1, 2)
        self.locations = torch.zeros(staged_rows, _ROWS, dtype=torch.int64)
        self.positions = torch.zeros(staged_rows, _ROWS, dtype=torch.int64)
        self.lengths = torch.zeros(staged_rows, dtype=torch.int32)
        self.written: Counter[float] = Counter()

    def put(self, slot: int, tag: float) -> None:
        self.values[slot] = tag

    def tag(self, slot: int) -> float:
        return float(self.values[slot, 0, 0])

    def stage(self, locations: list[list[int]], tags: list[list[float]], commits: list[int]) -> None:
        batch = len(locations)
        self.projected[: batch * _ROWS, 0, 1] = torch.tensor(tags).view(-1, 1, 1)
        kv_staging(
            cache_locs=torch.tensor(locations),
            positions=torch.arange(_ROWS).repeat(batch, 1),
            commit_lens=torch.tensor(commits, dtype=torch.int32),
            out_cache_locs=self.locations,
            out_positions=self.positions,
            out_commit_lens=self.lengths,
        )

    def write(self, rows: int | None = None) -> None:
        """``staged_kv`` on the first rows, or on all of them; counts what it has to write."""
        rows = len(self.lengths) if rows is None else rows
        for row in range(rows):
            first = row * _ROWS
            self.written.update(self.projected[first : first + int(self.lengths[row]), 0, 1, 0, 0].tolist())
        staged_kv(
            projected_kv=self.projected[: rows * _ROWS],
            k_norm_weights=torch.ones(1, 2),
            cos_sin=torch.ones(_POSITIONS, 2),
            neox=True,
            positions=self.positions[:rows],
            cache_locs=self.locations[:rows],
            location_map=None,
            ring_rows=None,
            ring_size=0,
            eps=1e-6,
            kv_scales=None,
            out_commit_lens=self.lengths[:rows],
            out_keys=[self.keys],
            out_values=[self.values],
        )

    def do(self, todo: Todo, graph_rows: int | None = None) -> None:
        """What a caller does with an answer; a draft graph with the write at its head writes whatever is asked."""
        if todo is Todo.WRITE:
            self.write()
        if graph_rows is not None:
            self.write(graph_rows)


_TAGS = [[100.0, 101.0, 102.0], [200.0, 201.0, 202.0]]


def _staged() -> tuple[Memory, Deferral]:
    """The case of the reports: places [10, 11, 12 | 20, 21, 22], commit lengths [2, 1]."""
    memory, deferral = Memory(4), Deferral(4)
    for rows in (1, 2):
        deferral.captured(rows)
    memory.do(deferral.before_verify())
    memory.stage([[10, 11, 12], [20, 21, 22]], _TAGS, [2, 1])
    deferral.staged(2)
    return memory, deferral


def _tags(memory: Memory) -> list[float]:
    return [memory.tag(slot) for slot in (10, 11, 12, 20, 21, 22)]


@pytest.mark.parametrize("event", ["prefill", "smaller graph", "graph", "eager draft", "second staging", "move"])
def test_the_write_comes_once_and_before_any_read(event: str) -> None:
    memory, deferral = _staged()
    assert _tags(memory) == [0.0] * 6, "staging alone writes no KV"
    if event == "prefill":
        memory.do(deferral.before_prefill())
    elif event == "smaller graph":
        memory.do(deferral.before_draft(1), graph_rows=1)
    elif event == "graph":
        memory.do(deferral.before_draft(2), graph_rows=2)
    elif event == "eager draft":
        memory.do(deferral.before_draft(None))
    elif event == "move":
        memory.do(deferral.before_move())
    else:
        memory.do(deferral.before_verify())
        memory.stage([[30, 31, 32]], [[300.0, 301.0, 302.0]], [3])
        deferral.staged(1)
    assert _tags(memory) == [100.0, 101.0, 0.0, 200.0, 0.0, 0.0]
    for slot in (10, 11, 20):
        memory.put(slot, _SENTINEL)
    memory.do(deferral.before_draft(2), graph_rows=2)  # a replay
    memory.do(deferral.before_prefill())
    assert _tags(memory) == [_SENTINEL, _SENTINEL, 0.0, _SENTINEL, 0.0, 0.0], "it was written again"
    assert [memory.written[tag] for tag in (100.0, 101.0, 200.0)] == [1, 1, 1]
    assert [memory.tag(slot) for slot in (30, 31, 32)] == (
        [300.0, 301.0, 302.0] if event == "second staging" else [0.0] * 3
    )


@pytest.mark.parametrize("rows", [None, [0]], ids=["flush", "abort of one"])
def test_a_new_owners_sentinel_survives(rows: list[int] | None) -> None:
    memory, deferral = _staged()
    for row in deferral.drop(rows):
        memory.lengths[row] = 0
    memory.put(10, _SENTINEL)
    memory.do(deferral.before_draft(2), graph_rows=2)
    memory.do(deferral.before_draft(None))
    memory.do(deferral.before_prefill())
    assert memory.tag(10) == _SENTINEL
    assert _tags(memory)[1:] == [0.0, 0.0, 0.0 if rows is None else 200.0, 0.0, 0.0]


@dataclass
class Request:
    """Slots that a request has, and the tag that each has to hold when it is read."""

    slots: list[int] = field(default_factory=list)
    tags: list[float] = field(default_factory=list)
    row: int | None = None  # of the staging


class DeferredCommits(RuleBasedStateMachine):
    """Requests come, draft, end and are dropped in any order, on few slots that are soon used again."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.deferral = Memory(4), Deferral(4)
        self.writing = {2, 4}  # draft graphs with the write at their head; that of one row has none
        for rows in self.writing:
            self.deferral.captured(rows)
        self.live: list[Request] = []
        self.kept: list[Request] = []  # in the prefix cache
        self.free = list(range(1, _SLOTS))
        self.count = 0.0

    def _take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def _give(self, slots: list[int]) -> None:
        self.free = slots + self.free  # the next owner gets them at once

    def _next_tags(self, count: int) -> list[float]:
        self.count += count
        return [self.count - count + index + 1 for index in range(count)]

    def _read(self, requests: list[Request]) -> None:
        for request in requests:
            found = [self.memory.tag(slot) for slot in request.slots]
            assert found == request.tags, "a token was read that is not there"

    @precondition(lambda self: len(self.live) < 4 and len(self.free) > 20)
    @rule(tokens=st.integers(1, 4))
    def prefill(self, tokens: int) -> None:
        self.memory.do(self.deferral.before_prefill())
        self._read(self.kept)  # it may hit any prefix
        request = Request(self._take(tokens), self._next_tags(tokens))
        for slot, tag in zip(request.slots, request.tags, strict=True):
            self.memory.put(slot, tag)
        self.live.append(request)

    @precondition(lambda self: self.live and len(self.free) > 20)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        sizes = [rows for rows in (1, 2, 4) if rows >= len(self.live)]
        graph = data.draw(st.sampled_from([*sizes, None]))
        self.memory.do(self.deferral.before_draft(graph), graph_rows=graph if graph in self.writing else None)
        self._read(self.live)
        self._verify(data, graph or len(self.live))

    @precondition(lambda self: self.live and len(self.free) > 20)
    @rule(data=st.data())
    def verify_without_a_draft(self, data: st.DataObject) -> None:
        self._verify(data, len(self.live))

    def _verify(self, data: st.DataObject, batch: int) -> None:
        self.memory.do(self.deferral.before_verify())
        places = [self._take(_ROWS) for _ in self.live]
        tags = [self._next_tags(_ROWS) for _ in self.live]
        commits = [data.draw(st.integers(1, _ROWS)) for _ in self.live]
        padding = batch - len(self.live)
        nan = [[float("nan")] * _ROWS]
        self.memory.stage(places + [[0] * _ROWS] * padding, tags + nan * padding, commits + [0] * padding)
        self.deferral.staged(len(self.live))
        for row, (request, slots, new, commit) in enumerate(zip(self.live, places, tags, commits, strict=True)):
            request.row = row
            request.slots += slots[:commit]
            request.tags += new[:commit]
            self._give(slots[commit:])
        for request in self.kept:
            request.row = None  # what was staged for it is written

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._drop([self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.kept.append(self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self._drop([self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1)))])

    @precondition(lambda self: len(self.live) > 2)
    @rule()
    def flush(self) -> None:
        for row in self.deferral.drop():
            self.memory.lengths[row] = 0
        for request in self.live + self.kept:
            self._give(request.slots)
        self.live, self.kept = [], []

    def _drop(self, requests: list[Request]) -> None:
        for row in self.deferral.drop([request.row for request in requests if request.row is not None]):
            self.memory.lengths[row] = 0
        for request in requests:
            self._give(request.slots)

    @precondition(lambda self: self.deferral.pending)
    @rule(graphs=st.sets(st.sampled_from([1, 2, 4])))
    def recapture(self, graphs: set[int]) -> None:
        self.memory.do(self.deferral.before_recapture())
        warm = [[slot] * _ROWS for slot in (1, 2)]
        self.memory.stage(warm, [[_SENTINEL] * _ROWS] * 2, [_ROWS] * 2)
        self.memory.lengths.zero_()
        self.deferral.disarmed()
        for rows in graphs:
            self.deferral.captured(rows)
        self.writing = graphs

    @precondition(lambda self: self.deferral.pending)
    @rule()
    def move(self) -> None:
        self.memory.do(self.deferral.before_move())
        self._read(self.live + self.kept)

    @invariant()
    def what_is_not_pending_is_in_place(self) -> None:
        for request in self.live + self.kept:
            pending = request.row in self.deferral.pending
            staged = set(self.memory.locations[request.row].tolist()) if pending else set()
            for slot, tag in zip(request.slots, request.tags, strict=True):
                assert slot in staged or self.memory.tag(slot) == tag, f"slot {slot}: another's, or not written"

    @invariant()
    def nothing_is_written_twice(self) -> None:
        assert max(self.memory.written.values(), default=0) <= 1


DeferredCommits.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
test_deferred_commits = DeferredCommits.TestCase
