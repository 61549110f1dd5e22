"""The closed loop: output with speculation equals output without, whatever the draft is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from embedded_tiny import TinyModels, slots_plan, tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_mega_plugin.embedded import Completion, Engine, Request, RequestError, stages
from sgl_mega_plugin.embedded.batch import Batch
from sgl_mega_plugin.embedded.decode import Committed, Decoder
from sgl_mega_plugin.embedded.kv import PagedKv, Row

CONTEXT = 64
MODELS = tiny_models(max_positions=CONTEXT)


def engine(models: TinyModels = MODELS, **options: Any) -> Engine:
    """An engine whose whole KV memory is poisoned."""
    made = Engine(models, **options)
    poison(made)
    return made


def poison(made: Engine) -> None:
    for cache in (made.kv.target, made.kv.draft):
        if cache is not None:
            cache.fill(math.nan)


def assert_all_freed(made: Engine) -> None:
    allocator = made.kv.allocator
    assert allocator.allocated == allocator.freed > 0
    assert made.kv.free_rows == made.max_batch


def outputs(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(c.tokens, c.text, c.finish_reason) for c in completions]


def prompts(*lengths: int, **fields: Any) -> list[Request]:
    """Prompts of these lengths, each with other ids; EOS may come where it will."""
    return [
        Request(prompt_ids=tuple((7 * index + 5 * place + 2) % 24 for place in range(length)), **fields)
        for index, length in enumerate(lengths)
    ]


class Oracle:
    """A draft_block that knows one request's output and gets the first ``right`` tokens of a block right."""

    def __init__(self, known: Sequence[int], right: Sequence[int], vocab_size: int = 24) -> None:
        self._known, self._right, self._vocab = [*known, *[0] * 8], cycle(right), vocab_size
        self.seen = 0  # tokens of the output so far

    def heard(self, _: int, tokens: list[int]) -> None:
        self.seen += len(tokens)

    def __call__(self, *, out_draft_tokens: torch.Tensor, **_: Any) -> None:
        gamma = out_draft_tokens.shape[1]
        assert out_draft_tokens.shape[0] == 1, "an oracle knows one request"
        block = self._known[self.seen : self.seen + gamma]
        block += [0] * (gamma - len(block))
        right = next(self._right)
        out_draft_tokens[0] = torch.tensor(
            [token if place < right else (token + 1) % self._vocab for place, token in enumerate(block)]
        )


@pytest.fixture
def with_oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Completion]:
    """Run one request with an oracle that knows ``known`` as its draft."""

    def run(request: Request, known: Sequence[int], right: Sequence[int], **options: Any) -> Completion:
        oracle = Oracle(known, right)
        monkeypatch.setattr(stages, "draft_block", oracle)
        made = engine(max_batch=1, **options)
        completion = made.generate([request], on_tokens=oracle.heard)[0]
        assert_all_freed(made)
        return completion

    return run


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_greedy_output_does_not_depend_on_speculation(data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, 23), min_size=1, max_size=30).map(tuple)
    requests = [
        Request(
            prompt_ids=data.draw(ids),
            max_new_tokens=data.draw(st.one_of(st.none(), st.integers(1, 30))),
            ignore_eos=data.draw(st.booleans()),
            stop_ids=data.draw(st.frozensets(st.integers(0, 23), max_size=1)),
        )
        for _ in range(data.draw(st.integers(1, 6)))
    ]
    batch = data.draw(st.integers(1, 4))
    plain = engine(speculative=False, max_batch=batch).generate(requests)
    speculative = engine(
        max_batch=batch,
        gamma=data.draw(st.integers(1, 7)),
        page_size=data.draw(st.sampled_from([1, 16, 64])),
        pad_to=data.draw(st.sampled_from([None, 4, 6])),
    )
    assert outputs(speculative.generate(requests)) == outputs(plain)
    assert_all_freed(speculative)


@pytest.mark.parametrize("gamma", range(1, 8))
@pytest.mark.parametrize("right", [[0], [1], [7], [3, 0, 7, 1, 2]], ids=["never", "one", "always", "mixed"])
def test_any_number_of_accepted_drafts(with_oracle: Callable[..., Completion], gamma: int, right: list[int]) -> None:
    request = prompts(5, max_new_tokens=41, ignore_eos=True)[0]
    plain = engine(speculative=False).generate([request])[0]
    completion = with_oracle(request, plain.tokens, right, gamma=gamma)
    assert outputs([completion]) == outputs([plain])
    wanted = [min(value, gamma) + 1 for value, _ in zip(cycle(right), range(completion.steps), strict=False)]
    # In the last block the oracle has run out of output, so only what precedes it is certain.
    assert list(completion.accept_lengths[:-1]) == wanted[:-1]


def test_a_stop_inside_the_block_is_trimmed_by_the_host(with_oracle: Callable[..., Completion]) -> None:
    request = prompts(4, max_new_tokens=24, ignore_eos=True)[0]
    known = engine(speculative=False).generate([request])[0].tokens
    firsts = [place for place, token in enumerate(known) if token not in known[:place] and 1 <= place <= 16]
    assert len({(place - 1) % 4 for place in firsts}) == 4, f"first occurrences {firsts} miss a place of the block"
    for place in firsts:
        stopped = request.model_copy(update={"stop_ids": frozenset({known[place]})})
        completion = with_oracle(stopped, known, [3], gamma=3)
        assert completion.tokens == known[: place + 1]
        assert completion.finish_reason == "stop"
        assert set(completion.accept_lengths) == {4}, "the device commits the full block"
        assert outputs([completion]) == outputs(engine(speculative=False).generate([stopped]))


def test_a_stop_string_across_a_block_border(with_oracle: Callable[..., Completion]) -> None:
    request = prompts(4, max_new_tokens=24, ignore_eos=True)[0]
    plain = engine(speculative=False).generate([request])[0]
    for start in range(1, 9):
        stop = plain.text[start : start + 3]
        stopped = request.model_copy(update={"stop": (stop,)})
        completion = with_oracle(stopped, plain.tokens, [3], gamma=3)
        assert completion.text == plain.text[: plain.text.index(stop)]
        assert outputs([completion]) == outputs(engine(speculative=False).generate([stopped]))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("right", [None, [7], [2, 5]], ids=["model", "always", "mixed"])
@pytest.mark.parametrize("committed", [57, 60, 61, 63, 64])
def test_context_end(
    with_oracle: Callable[..., Completion], committed: int, right: list[int] | None, page_size: int
) -> None:
    request = prompts(committed, max_new_tokens=None, ignore_eos=True)[0]
    plain = engine(speculative=False).generate([request])[0]
    assert len(plain.tokens) == CONTEXT - committed + 1
    assert plain.finish_reason == "context"
    if right is None:
        assert outputs(engine(page_size=page_size).generate([request])) == outputs([plain])
    else:
        completion = with_oracle(request, plain.tokens, right, page_size=page_size)
        assert outputs([completion]) == outputs([plain])
        assert sum(completion.accept_lengths) == CONTEXT - committed, "no commit past the context"


@pytest.mark.parametrize("page_size", [1, 16])
def test_nothing_is_written_outside_a_request(page_size: int) -> None:
    """At the context's end beside a neighbour: the padding page and what nobody owns stay poisoned."""
    spare = 64
    requests = prompts(61, 20, max_new_tokens=None, ignore_eos=True)
    made = engine(max_batch=2, page_size=page_size, pool_tokens=2 * CONTEXT + spare, pad_to=4)
    alone = [engine(speculative=False).generate([request])[0] for request in requests]
    owned: set[int] = set()
    opened = made.kv.open

    def watch(tokens: int) -> Row:
        row = opened(tokens)
        owned.update(page * page_size + place for page in row.pages for place in range(page_size))
        return row

    made.kv.open = watch  # type: ignore[method-assign]
    assert outputs(made.generate(requests)) == outputs(alone)
    assert made.kv.draft is not None
    for name, cache in (("target", made.kv.target), ("draft", made.kv.draft)):
        for tensor in (*cache.keys, *cache.values):
            written = {slot for slot in range(len(tensor)) if not tensor[slot].isnan().all()}
            assert written <= owned, f"{name}: slots {sorted(written - owned)} belong to no request"


def test_rows_of_a_shrunken_batch_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests, then one: what the others freed is filled with a mark that must survive."""
    requests = prompts(3, 4, 5, 6, ignore_eos=True)
    lengths = (30, 4, 6, 9)
    requests = [r.model_copy(update={"max_new_tokens": n}) for r, n in zip(requests, lengths, strict=True)]
    alone = [engine(speculative=False).generate([request])[0] for request in requests]
    made = engine(max_batch=4, pad_to=4)
    freed: list[int] = []
    close = PagedKv.close

    def mark(kv: PagedKv, row: Row) -> None:
        slots = list(row.pages)  # page size 1
        close(kv, row)
        freed.extend(slots)
        for cache in (made.kv.target, made.kv.draft):
            assert cache is not None
            for tensor in (*cache.keys, *cache.values):
                tensor[slots] = -77.0

    monkeypatch.setattr(PagedKv, "close", mark)
    assert outputs(made.generate(requests)) == outputs(alone)
    assert made.kv.draft is not None
    for tensor in (*made.kv.target.keys, *made.kv.target.values, *made.kv.draft.keys, *made.kv.draft.values):
        assert (tensor[freed] == -77.0).all()


def test_a_row_reused_by_a_shorter_request_reads_nothing_stale() -> None:
    long, short = prompts(40, 3, max_new_tokens=12, ignore_eos=True)
    assert engine(max_batch=1).generate([long, short])[1:] == engine(max_batch=1).generate([short])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_poison_does_not_change_output(temperature: float) -> None:
    """Accept lengths included: a draft that reads poison proposes other tokens."""
    requests = [r.model_copy(update={"seed": 5}) for r in prompts(3, 9, temperature=temperature, max_new_tokens=20)]
    assert engine().generate(requests) == Engine(MODELS).generate(requests)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_draft_reads_only_context_that_was_written(monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    """Rows and pages change owners, and what is freed is poisoned again: base logits stay finite."""
    requests = prompts(30, 2, 58, 7, 1, 44, 3, 3, max_new_tokens=None, ignore_eos=True)
    requests = [r.model_copy(update={"temperature": 0.7 * (n % 2)}) for n, r in enumerate(requests)]
    wanted = outputs(engine(speculative=False).generate(requests[::2]))
    block, close = stages.draft_block, PagedKv.close

    def finite(**arguments: Any) -> None:
        assert arguments["base_logits"].isfinite().all()
        block(**arguments)

    def poison_pages(kv: PagedKv, row: Row) -> None:
        slots = [page * page_size + place for page in row.pages for place in range(page_size)]
        close(kv, row)
        for cache in (kv.target, kv.draft):
            assert cache is not None
            for tensor in (*cache.keys, *cache.values):
                tensor[slots] = math.nan

    monkeypatch.setattr(stages, "draft_block", finite)
    monkeypatch.setattr(PagedKv, "close", poison_pages)
    made = engine(max_batch=3, page_size=page_size)
    assert outputs(made.generate(requests))[::2] == wanted


def test_greedy_rows_are_the_same_beside_sampled_ones() -> None:
    greedy = prompts(3, 9, 12, max_new_tokens=20, ignore_eos=True)
    mixed = [
        greedy[0],
        greedy[1].model_copy(update={"temperature": 0.9}),
        greedy[2].model_copy(update={"temperature": 0.9, "top_k": 1}),
    ]
    wanted = outputs(engine(speculative=False).generate(greedy))
    found = outputs(engine().generate(mixed))
    assert found[0] == wanted[0]
    assert found[1] != wanted[1]
    assert found[2] == wanted[2]


def test_plain_sampling_depends_on_the_request_alone() -> None:
    requests = [r.model_copy(update={"seed": seed}) for seed, r in enumerate(prompts(3, 9, 5, temperature=1.0))]
    requests = [r.model_copy(update={"max_new_tokens": 15}) for r in requests]
    together = outputs(engine(speculative=False).generate(requests))
    assert together == [outputs(engine(speculative=False).generate([r]))[0] for r in requests]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        pytest.param({"top_k": 3}, lambda law, token: (law > law[token]).sum() < 3, id="top-k"),
        pytest.param({"top_p": 0.5}, lambda law, token: law[law > law[token]].sum() < 0.5, id="top-p"),
        pytest.param({"min_p": 0.2}, lambda law, token: law[token] >= 0.2 * law.max(), id="min-p"),
    ],
)
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_a_token_that_a_filter_leaves_out_is_never_drawn(
    fields: dict[str, Any], kept: Callable[[torch.Tensor, int], torch.Tensor], speculative: bool
) -> None:
    def left_out(**filters: float) -> int:
        """How many of 100 tokens the filter leaves out; a token may well be another than the likeliest."""
        request = prompts(5, temperature=6.0, max_new_tokens=20, ignore_eos=True)[0].model_copy(update=filters)
        made, count, others = engine(speculative=speculative), 0, 0
        for completion in made.generate([request.model_copy(update={"seed": seed}) for seed in range(5)]):
            for place, token in enumerate(completion.tokens):
                logits = made.next_logits([*(request.prompt_ids or ()), *completion.tokens[:place]])
                law = (logits.double() / 6.0).softmax(-1)
                count += not kept(law, token)
                others += token != law.argmax().item()
        assert others, "only the likeliest token was ever drawn"
        return count

    assert left_out() > 0, "nothing to leave out"
    assert left_out(**fields) == 0


@pytest.mark.parametrize("names", [None, "default", "all"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_lengths_and_anchors_come_from_the_device_alone(
    monkeypatch: pytest.MonkeyPatch, names: str | None, temperature: float
) -> None:
    """A step gets nonsense for the host's own; at each step's end what the device relays is what the host counts."""
    requests = prompts(3, 20, 9, 5, 1, ignore_eos=True, temperature=temperature, seed=3)
    requests = [r.model_copy(update={"max_new_tokens": 7 + 9 * n}) for n, r in enumerate(requests)]
    plan = slots_plan(names) if names else None
    wanted = Engine(MODELS, plan=plan, max_batch=3).generate(requests)
    step, checked = Decoder.speculative_step, []

    def watched(decoder: Decoder, batch: Batch, key: int, offset: torch.Tensor) -> Committed:
        nonsense = {"seq_lens": torch.full_like(batch.seq_lens, 2**40), "anchors": torch.full_like(batch.anchors, -1)}
        before = decoder._relay.lens.clone(), decoder._relay.tokens.clone()
        committed = step(decoder, replace(batch, **nonsense), key, offset)
        for row, tokens, length in zip(batch.table_rows, committed.tokens, committed.lengths, strict=True):
            assert (decoder._relay.lens[row].item(), decoder._relay.tokens[row].item()) == (length, tokens[-1])
        others = [row for row in range(3) if row not in batch.table_rows]
        for old, new in zip(before, decoder._relay, strict=True):
            assert torch.equal(old[others], new[others]), "a table row of no live request was written"
        checked.append(len(batch.table_rows))
        return committed

    monkeypatch.setattr(Decoder, "speculative_step", watched)
    made = engine(plan=plan, max_batch=3, pad_to=5)
    assert made.generate(requests) == wanted
    assert {1, 3} <= set(checked), "the batch has to shrink for this to test padding rows"


def test_seeds_repeat_and_differ() -> None:
    request = prompts(4, temperature=1.0, max_new_tokens=20, ignore_eos=True)[0]
    made = engine()
    seeded = [request.model_copy(update={"seed": 3}), request.model_copy(update={"seed": 4})]
    first, second = outputs(made.generate(seeded))
    assert first != second
    assert outputs(made.generate(seeded)) == [first, second]
    unseeded = [outputs(made.generate([request]))[0] for _ in range(3)]
    assert len(set(unseeded)) == 3


def test_noise_moves_with_sampled_blocks_and_with_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    block = stages.draft_block

    def watch(**arguments: Any) -> None:
        seen.append((arguments["noise_key"], arguments["noise_offset"].item()))
        block(**arguments)

    monkeypatch.setattr(stages, "draft_block", watch)
    made = engine()
    requests = {seed: prompts(3, temperature=1.0, max_new_tokens=20, ignore_eos=True, seed=seed)[0] for seed in (1, 2)}
    greedy = prompts(4, max_new_tokens=20, ignore_eos=True)

    def calls(*these: Request) -> list[tuple[int, int]]:
        seen.clear()
        made.generate(these)
        return list(seen)

    first, again, other = calls(requests[1]), calls(requests[1]), calls(requests[2])
    assert [offset for _, offset in first] == list(range(len(first)))
    assert first == again
    assert len({key for key, _ in first}) == 1
    assert first[0][0] != other[0][0]
    assert {offset for _, offset in calls(*greedy)} == {0}, "a greedy block does not advance the counter"


def test_more_requests_than_rows_and_the_stream_of_tokens() -> None:
    requests = prompts(*range(1, 12), max_new_tokens=9)
    heard: dict[int, list[int]] = {}
    made = engine(max_batch=3)
    completions = made.generate(requests, on_tokens=lambda index, new: heard.setdefault(index, []).extend(new))
    assert [tuple(heard[index]) for index in range(11)] == [c.tokens for c in completions]
    assert outputs(completions) == outputs(engine(speculative=False, max_batch=3).generate(requests))
    assert_all_freed(made)


def test_requests_wait_for_a_small_pool() -> None:
    requests = prompts(20, 20, 20, max_new_tokens=10, ignore_eos=True)
    made = engine(max_batch=3, pool_tokens=40)  # one request needs 20 + 10 - 1 + 7
    assert outputs(made.generate(requests)) == outputs(engine(speculative=False).generate(requests))
    assert_all_freed(made)


def test_a_failing_callback_leaves_the_engine_usable() -> None:
    requests = prompts(3, 9, max_new_tokens=12, ignore_eos=True)
    made = engine(max_batch=2)

    def fail(_: int, __: list[int]) -> None:
        raise RuntimeError("the reader is gone")

    with pytest.raises(RuntimeError, match="the reader is gone"):
        made.generate(requests, on_tokens=fail)
    assert_all_freed(made)
    assert outputs(made.generate(requests)) == outputs(engine(speculative=False).generate(requests))


def test_no_requests_no_completions() -> None:
    assert engine().generate([]) == []


@pytest.mark.parametrize(
    ("request_", "options", "message"),
    [
        pytest.param(prompts(65)[0], {}, "request 1: a prompt of 65 tokens is longer than", id="prompt"),
        pytest.param(
            prompts(60, max_new_tokens=6)[0], {}, "request 1: max_new_tokens 6 .* at most 5; lower it", id="tokens"
        ),
        pytest.param(
            Request(prompt_ids=(24,), max_new_tokens=1), {}, r"request 1: prompt ids \[24\] are outside", id="ids"
        ),
        pytest.param(
            prompts(20, max_new_tokens=20)[0], {"pool_tokens": 32}, "request 1: needs 46 KV slots, the pool has 32",
            id="pool",
        ),
    ],
)  # fmt: skip
def test_a_bad_request_is_found_before_anything_runs(request_: Request, options: dict[str, Any], message: str) -> None:
    heard: list[int] = []
    made = engine(**options)
    with pytest.raises(RequestError, match=message):
        made.generate([prompts(3, max_new_tokens=2)[0], request_], on_tokens=lambda *_: heard.append(1))
    assert heard == []
    assert made.kv.allocator.allocated == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"gamma": 0}, r"gamma 0 is outside \[1, 7\]", id="gamma-0"),
        pytest.param({"gamma": 8}, r"gamma 8 is outside \[1, 7\]", id="gamma-8"),
        pytest.param({"max_context": 65}, r"max_context 65 is outside \[1, 64\]", id="context"),
        pytest.param({"max_batch": 0}, "max_batch 0 and pad_to None", id="batch"),
        pytest.param({"max_batch": 4, "pad_to": 3}, "max_batch 4 and pad_to 3", id="pad"),
        pytest.param({"page_size": 2}, "page size 2 is none of", id="page"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(MODELS, **options)


def test_gamma_of_a_draft_trained_for_less() -> None:
    models = tiny_models(gamma=3)
    assert Engine(models).gamma == 3
    with pytest.raises(ValueError, match=r"gamma 4 is outside \[1, 3\]"):
        Engine(models, gamma=4)


def test_long_prompts_are_prefilled_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = prompts(50, 33, max_new_tokens=10, ignore_eos=True)
    whole = outputs(engine().generate(requests))
    monkeypatch.setattr("sgl_mega_plugin.embedded.decode.PREFILL_CHUNK", 16)
    assert outputs(engine().generate(requests)) == whole
