"""The draft's context KV, at once and deferred: every draft reads the same, and a new owner's slots stay its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from embedded_tiny import slots_plan, tiny_models
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_plugin.embedded import Completion, Engine, Request, stages
from sgl_mega_plugin.embedded.batch import Batch, BatchRow
from sgl_mega_plugin.embedded.commit import ContextWriter
from sgl_mega_plugin.embedded.kv import Cache, PagedKv, Row
from sgl_mega_plugin.embedded.runtime import plan_stages

MODELS = tiny_models(max_positions=64)
AT_ONCE, DEFERRED = "none,context_kv", "none,kv_staging,deferred_kv"
MARK = -77.0
Prepare = Callable[[Sequence[Request]], tuple[list[Completion], list[Tensor]]]


def requests(*lengths: int, tokens: Sequence[int] = (9,)) -> list[Request]:
    return [
        Request(
            prompt_ids=tuple((7 * index + 5 * place + 2) % 24 for place in range(length)),
            max_new_tokens=tokens[index % len(tokens)],
            ignore_eos=True,
        )
        for index, length in enumerate(lengths)
    ]


@pytest.fixture
def bigrams(monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Outputs without speculation; from then on drafts follow their bigrams, so blocks are accepted in part.

    The second list gets every block's base logits, which are what the draft made of its context.
    """

    def prepare(these: Sequence[Request]) -> tuple[list[Completion], list[Tensor]]:
        plain = Engine(MODELS, speculative=False).generate(these)
        following = {a: b for c in plain for a, b in zip(c.tokens, c.tokens[1:], strict=False)}
        seen: list[Tensor] = []

        def follow(*, base_logits: Tensor, anchor_tokens: Tensor, out_draft_tokens: Tensor, **_: Any) -> None:
            seen.append(base_logits.clone())
            for row, token in enumerate(anchor_tokens.tolist()):
                for step in range(out_draft_tokens.shape[1]):
                    token = following.get(token, 0)
                    out_draft_tokens[row, step] = token

        monkeypatch.setattr(stages, "draft_block", follow)
        return plain, seen

    return prepare


def engine(names: str, **options: Any) -> Engine:
    """An engine with these slots, whose whole KV memory is poisoned."""
    made = Engine(MODELS, plan=slots_plan(names), **options)
    for tensor in tensors(made):
        tensor.fill_(math.nan)
    return made


def tensors(made: Engine) -> list[Tensor]:
    assert made.kv.draft is not None
    return [*made.kv.target.keys, *made.kv.target.values, *made.kv.draft.keys, *made.kv.draft.values]


@pytest.mark.parametrize("pad_to", [None, 5], ids=["unpadded", "padded"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_draft_sees_the_context_that_a_commit_at_once_leaves(
    bigrams: Prepare, page_size: int, pad_to: int | None
) -> None:
    """Requests finish at different times, others start between two steps, batches shrink."""
    these = requests(3, 9, 20, 5, 33, 1, tokens=(30, 7, 18))
    plain, seen = bigrams(these)
    found = {}
    for names in (AT_ONCE, DEFERRED):
        seen.clear()
        completions = engine(names, max_batch=3, page_size=page_size, pad_to=pad_to).generate(these)
        assert [c.tokens for c in completions] == [c.tokens for c in plain]
        found[names] = completions, list(seen)
    (at_once, first), (deferred, second) = found.values()
    assert deferred == at_once
    lengths = {length for c in at_once for length in c.accept_lengths}
    assert {1, 8} < lengths, f"accepted lengths {lengths} do not test a commit of part of a block"
    assert len(first) == len(second)
    for step, (wanted, logits) in enumerate(zip(first, second, strict=True)):
        live = ~wanted.isnan().all(-1).all(-1)  # a padding row attends to nothing
        assert wanted[live].isfinite().all()
        assert torch.equal(logits[live], wanted[live]), f"step {step}"


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots as they are given back, each filled with a mark at that moment; the page size is 1."""
    found: list[int] = []
    close = PagedKv.close

    def mark(kv: PagedKv, row: Row) -> None:
        slots = list(row.pages)
        close(kv, row)
        found.extend(slots)
        for cache in (kv.target, kv.draft):
            for tensor in (*cache.keys, *cache.values) if cache is not None else ():
                tensor[slots] = MARK

    monkeypatch.setattr(PagedKv, "close", mark)
    return found


def assert_marked(made: Engine, slots: list[int]) -> None:
    assert len(slots) > 30
    for tensor in tensors(made):
        written = [slot for slot in slots if (tensor[slot] != MARK).any()]
        assert not written, f"slots {written} were written after their request had left"


@pytest.mark.parametrize("names", ["default", DEFERRED, "all"])
def test_what_a_finished_request_staged_is_not_written(freed: list[int], names: str) -> None:
    these = requests(3, 4, 5, 6, tokens=(30, 4, 6, 9))
    plain = Engine(MODELS, speculative=False).generate(these)
    made = engine(names, max_batch=4, pad_to=4)
    freed.clear()
    assert [c.tokens for c in made.generate(these)] == [c.tokens for c in plain]
    assert_marked(made, freed)


@pytest.mark.parametrize("names", ["default", DEFERRED, "all"])
def test_what_an_aborted_run_staged_is_not_written(freed: list[int], names: str) -> None:
    """A reader fails after the second step. A prefill follows, then other requests in the same slots."""
    made = engine(names, max_batch=2)
    heard = []

    def fail(_: int, tokens: list[int]) -> None:
        heard.append(tokens)
        if len(heard) == 5:
            raise RuntimeError("the reader is gone")

    with pytest.raises(RuntimeError, match="the reader is gone"):
        made.generate(requests(3, 9, tokens=(20,)), on_tokens=fail)
    made.next_logits([1])  # before its prefill, whatever is still staged gets written
    assert_marked(made, freed)
    others = requests(8, 2, 11, tokens=(14,))
    assert made.generate(others) == engine(names, max_batch=2).generate(others)


class Writes:
    """A ContextWriter of M = 3 rows, T = 2, and the size of each call of ``staged_kv`` that it makes."""

    def __init__(self) -> None:
        setup = SlotSetup(backend=Backend.REFERENCE, device="cpu", max_batch=3, gamma=1, vocab_size=24)
        seams = plan_stages(slots_plan(DEFERRED), setup)
        self.cache, self.calls, self._write = draft_cache(), list[int](), seams.staged_kv
        self.writer = ContextWriter(MODELS.draft, self.cache, replace(seams, staged_kv=self), rows=3, width=2)

    def __call__(self, **arguments: Any) -> None:
        self.calls.append(len(arguments["out_commit_lens"]))
        self._write(**arguments)

    def stage(self, first: int, *commit_lens: int) -> None:
        """A verify of requests at table rows 0, 1, 2: their locations are first, first + 1 and so on."""
        places = torch.arange(2 * len(commit_lens)).view(-1, 2)
        self.writer.step(*step_of(len(commit_lens)), places + 4, places + first, torch.tensor(commit_lens).int())

    @property
    def written(self) -> set[int]:
        """Slots that hold something, the same in every layer."""
        sets = [
            {slot for slot in range(40) if (tensor[slot] != MARK).any()}
            for tensor in (*self.cache.keys, *self.cache.values)
        ]
        assert all(found == sets[0] for found in sets), f"layers differ: {sets}"
        return sets[0]


def draft_cache() -> Cache:
    config = MODELS.draft.config
    cache = Cache(config.layers, 40, config.kv_heads, config.head_dim, torch.float32, "cpu")
    cache.fill(MARK)
    return cache


def step_of(size: int) -> tuple[Batch, Tensor]:
    """A batch of greedy requests at table rows 0, 1, ..., and hidden states of their two rows each."""
    rows = [BatchRow(row, 4, 0, 0.0, 1, 1.0, 0.0, 0, 0) for row in range(size)]
    batch = Batch.build(rows, size=size, width=2, max_context=64, device="cpu")
    return batch, torch.randn(2 * size, 2 * MODELS.target.config.hidden)


@pytest.mark.parametrize(
    ("event", "written"),
    [
        pytest.param(lambda w: w.writer.before_draft(2), {10, 11, 12}, id="draft"),
        pytest.param(lambda w: w.writer.before_draft(3), {10, 11, 12}, id="larger-draft"),
        pytest.param(lambda w: w.writer.before_draft(1), {10, 11, 12}, id="smaller-draft"),
        pytest.param(lambda w: w.writer.before_prefill(), {10, 11, 12}, id="prefill"),
        pytest.param(lambda w: w.stage(20, 1), {10, 11, 12}, id="second-staging"),
        pytest.param(lambda w: (w.writer.forget(0), w.writer.before_draft(2)), {12}, id="abort"),
        pytest.param(lambda w: (w.writer.forget(0), w.writer.forget(1), w.writer.before_prefill()), set(), id="flush"),
        pytest.param(lambda w: (w.writer.forget(2), w.writer.before_draft(2)), {10, 11, 12}, id="abort-of-another"),
    ],
)
def test_a_staged_commit_is_written_once_before_anything_else(
    event: Callable[[Writes], object], written: set[int]
) -> None:
    """Staged: locations 10, 11 of the first request, 12 of the second, and no more of its two."""
    writes = Writes()
    writes.stage(10, 2, 1)
    assert writes.written == set()
    event(writes)
    assert writes.written == written
    writes.cache.fill(MARK)
    writes.writer.forget(0)  # what the second staging left
    for rows in (1, 2, 3):
        writes.writer.before_draft(rows)
    writes.writer.before_prefill()
    assert writes.written == set(), "written a second time"
    assert {1, 2, 3} <= set(writes.calls), "a draft's head is called whether or not anything is staged"


def test_without_slots_for_it_nothing_is_staged() -> None:
    setup = SlotSetup(backend=Backend.REFERENCE, device="cpu", max_batch=3, gamma=1, vocab_size=24)

    def never(**_: Any) -> None:
        raise AssertionError("called")

    seams = replace(plan_stages(slots_plan(AT_ONCE), setup), staged_kv=never, kv_staging=never)
    cache = draft_cache()
    writer = ContextWriter(MODELS.draft, cache, seams, rows=3, width=2)
    writer.before_draft(2)
    writer.before_prefill()
    writer.forget(0)
    places = torch.tensor([[10, 11]])
    writer.step(*step_of(1), places, places, torch.tensor([1]).int())
    assert [slot for slot in range(40) if (cache.keys[0][slot] != MARK).any()] == [10]
