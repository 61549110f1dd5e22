"""Workloads of the benchmark: what each seam gets, that it is random and in range, and its count of bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.bench.records import Cost, Settings, Size
from sgl_mega_plugin.bench.workloads import WORKLOADS, forward, sizes
from sgl_mega_plugin.contract import SEAMS, Provided
from sgl_mega_plugin.embedded import stages
from sgl_mega_plugin.registry import load_cases, load_reference
from sgl_mega_slots import SLOTS

_POINTS = [(seam, variant) for seam, workload in WORKLOADS.items() for variant in workload.variants]
#: Outputs of which only what a batch's lengths or rows reach is written.
_IN_PART = {
    "out_page_table",
    "out_kv_indices",
    "out_window_kv_indices",
    "out_relay_lens",
    "out_relay_tokens",
    "out_histories",
}
#: Models of the target's forward as they are timed.
_MODELS = dict(forward.MODELS)
_BY_SEAM = {slot.seam: Provided(slot=slot, distribution="d", version="0") for slot in SLOTS}


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV pool of 0.7 GB takes seconds to fill on a CPU, and a target's weights its memory."""
    monkeypatch.setattr(sizes, "KV_SLOTS", 300)
    monkeypatch.setattr(sizes, "ROPE_POSITIONS", 700)
    monkeypatch.setattr(forward, "VOCAB", 96)
    monkeypatch.setattr(forward, "CONTEXT", 40)
    for name, (_, _, _, queries) in _MODELS.items():
        monkeypatch.setitem(forward.MODELS, name, (4, 64, 128, queries))


def size_of(seam: str, variant: str = "", batch: int = 5, dtype: str = "float32", vocab: int = 97) -> Size:
    if not WORKLOADS[seam].shows_vocab:
        return Size(seam=seam, variant=variant, batch=batch)
    return Size(seam=seam, variant=variant, batch=batch, vocab=vocab, dtype=dtype)


def tensors(arguments: dict[str, Any]) -> dict[str, Tensor]:
    flat = {}
    for name, value in arguments.items():
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, Tensor):
                flat[f"{name}[{index}]"] = item
    return flat


def test_every_seam_has_a_workload() -> None:
    assert WORKLOADS.keys() == SEAMS.keys()


@pytest.mark.parametrize(("seam", "variant"), _POINTS)
def test_a_workload_is_what_the_seam_takes(seam: str, variant: str) -> None:
    """The names are the seam's; kinds, dtypes and numbers of axes those of the slot's own conformance cases."""
    found = WORKLOADS[seam].sets(size_of(seam, variant), "cpu", 1)[0]
    assert set(found) == set(SEAMS[seam].parameters)
    cases = [case.make("cpu") for case in load_cases(_BY_SEAM[seam]) if not case.kernel_only]
    for name, value in found.items():
        kinds = {
            (item.dtype if not item.is_floating_point() else "float", item.dim())
            if isinstance(item, Tensor)
            else type(item)
            for case in cases
            for item in (case[name][:1] if isinstance(case[name], list) else [case[name]])
        }
        item = value[0] if isinstance(value, list) else value
        kind = (
            (item.dtype if not item.is_floating_point() else "float", item.dim())
            if isinstance(item, Tensor)
            else type(item)
        )
        assert kind in kinds, f"{name}: {kind} is none of {kinds}"


@pytest.mark.parametrize(("seam", "variant"), _POINTS)
def test_the_embedded_engines_stage_takes_it(seam: str, variant: str) -> None:
    found = WORKLOADS[seam].sets(size_of(seam, variant, batch=2), "cpu", 1)[0]
    outputs = {
        name: value
        for name, value in tensors(found).items()
        if name.startswith("out_") and not value.is_floating_point()
    }
    for value in outputs.values():
        value.fill_(-7)
    getattr(stages, seam)(**found)
    for name, value in outputs.items():
        left = value == -7
        assert not left.all(), f"{name} was left as it was"
        assert name.partition("[")[0] in _IN_PART or not left.any(), f"{name} was written in part"


@pytest.mark.parametrize(("seam", "variant"), _POINTS)
def test_sets_differ_and_repeat(seam: str, variant: str) -> None:
    """Different contents set by set, the same on every run, and none of them zeros."""
    first, again = (WORKLOADS[seam].sets(size_of(seam, variant), "cpu", 3) for _ in range(2))
    inputs = [{name: value for name, value in tensors(one).items() if not name.startswith("out_")} for one in first]
    for one, same in zip(inputs, again, strict=True):
        for name, value in one.items():
            assert torch.equal(value, tensors(same)[name]), f"{name} does not repeat"
    for one, other in pairwise(inputs):
        assert any(not torch.equal(one[name], other[name]) for name in one)
    for name, value in inputs[0].items():
        greedy_has_none = name == "temperatures[0]" and variant == "greedy"
        nothing_asked = name == "min_ps[0]" and variant != "min_p"
        assert greedy_has_none or nothing_asked or bool((value != 0).any()), f"{name} holds nothing but zeros"


@pytest.mark.parametrize("seam", ["draft_block", "step_inputs", "context_kv"])
def test_what_is_large_is_shared_by_the_sets(seam: str) -> None:
    first, second = WORKLOADS[seam].sets(size_of(seam, WORKLOADS[seam].variants[0]), "cpu", 2)
    shared = {name for name, value in tensors(first).items() if tensors(second)[name].data_ptr() == value.data_ptr()}
    expected = {
        "draft_block": {"markov_w1[0]", "markov_w2[0]"},
        "step_inputs": {"req_to_token[0]"},
        "context_kv": {"k_norm_weights[0]", "cos_sin[0]"}
        | {f"{name}[{layer}]" for name in ("out_keys", "out_values") for layer in range(5)},
    }
    assert shared == expected[seam]


def test_a_target_is_shared_by_the_sets() -> None:
    first, second = WORKLOADS["target_forward"].sets(size_of("target_forward", "qwen3-0.6b"), "cpu", 2)
    own = {name for name, value in tensors(first).items() if tensors(second)[name].data_ptr() != value.data_ptr()}
    rows = {"input_ids", "positions", "cache_locs", "seq_lens", "req_pool_indices", "req_to_token"}
    assert own == {f"{name}[0]" for name in rows | {"out_tapped", "out_logits"}}


def test_greedy_drafts_are_accepted_in_part() -> None:
    arguments = WORKLOADS["greedy_accept"].sets(size_of("greedy_accept", batch=64), "cpu", 1)[0]
    stages.greedy_accept(**arguments)
    lengths = arguments["out_correct_lens"].float()
    assert 1 < lengths.mean() < 5
    assert len(lengths.unique()) > 4


def test_sampled_drafts_are_likely_under_both_laws() -> None:
    arguments = WORKLOADS["sampled_accept"].sets(size_of("sampled_accept", "sampled", batch=16), "cpu", 1)[0]
    p = arguments["target_logits"].view(16, 8, -1)[:, :-1].softmax(-1)
    q = arguments["draft_logits"].softmax(-1)
    drafted = arguments["candidates"][:, 1:].unsqueeze(-1)
    accepted = (p.gather(-1, drafted) / q.gather(-1, drafted)).clamp_max(1).mean()
    assert 0.5 < accepted < 0.95
    greedy = WORKLOADS["sampled_accept"].sets(size_of("sampled_accept", "one_hot", batch=16), "cpu", 1)[0]
    p = greedy["target_logits"].view(16, 8, -1)[:, :-1].softmax(-1)
    assert 0.2 < p.gather(-1, greedy["candidates"][:, 1:].unsqueeze(-1)).mean() < 0.9


def test_context_rows_are_apart_and_in_range() -> None:
    arguments = WORKLOADS["context_kv"].sets(size_of("context_kv", batch=32), "cpu", 1)[0]
    places = arguments["cache_locs"].flatten()
    assert len(places.unique()) == places.numel()
    assert (int(places.min()) > 0, int(places.max()) < 300) == (True, True)
    assert int(arguments["positions"].max()) < 700
    assert set(arguments["commit_lens"].tolist()) <= set(range(1, 9))
    assert len(arguments["commit_lens"].unique()) > 4


def test_more_requests_than_the_pool_has_rows_get_a_larger_pool() -> None:
    arguments = WORKLOADS["step_inputs"].sets(size_of("step_inputs", batch=100), "cpu", 1)[0]
    rows = arguments["req_pool_indices"]
    assert len(rows.unique()) == 100
    assert int(rows.max()) < len(arguments["req_to_token"])


def test_targets_are_as_large_as_their_names_say() -> None:
    """Weights in billions; those up to 4b share embedding and LM head."""
    for name, (layers, hidden, inner, queries) in _MODELS.items():
        attention = (2 * queries + 2 * sizes.HEADS) * sizes.HEAD_SIZE * hidden
        vocab = 151_936 * hidden * (2 if name == "qwen3-8b" else 1)
        weights = layers * (attention + 3 * hidden * inner) + vocab
        assert weights == pytest.approx(float(name.removeprefix("qwen3-").removesuffix("b")) * 1e9, rel=0.03)


def test_requests_of_a_forward_have_kv_slots_of_their_own() -> None:
    """Also where a batch needs more than the pool holds. What a step writes, no request reads."""
    arguments = WORKLOADS["target_forward"].sets(size_of("target_forward", "qwen3-0.6b", batch=32), "cpu", 1)[0]
    slots = arguments["req_to_token"]
    assert slots.shape == (32, 48)
    assert len(slots.unique()) == slots.numel()
    assert (int(slots.min()) > 0, int(slots.max()) < len(arguments["out_keys"][0])) == (True, True)
    assert torch.equal(arguments["cache_locs"].view(32, 8), slots[:, 40:].long())


def _draft_bytes(batch: int, vocab: int, base: int, *, sampled: bool) -> Cost:
    """fp32 base makes fp32 step logits, bf16 base bf16 ones; weights are bf16, R 256."""
    logits = batch * 7 * vocab * base
    read = logits + batch * 8 + vocab * 256 * 2 + batch * 7 * 256 * 2 + batch * 4 + 8
    return Cost(bytes_read=read, bytes_written=batch * 7 * 8 + (logits if sampled else 0))


def _forward_bytes(batch: int) -> Cost:
    """Four layers, E 64, F 128, A 16, H 8, D 128, V 96, contexts of 40; three taps."""
    layer = (64 * 32 * 128 + 64 * 16 * 128 + 3 * 64 * 128) * 2
    token = 4 * 2 * 8 * 128 * 2
    return Cost(
        bytes_read=4 * layer + 96 * 64 * 2 + batch * 40 * token,
        bytes_written=batch * 8 * (token + (3 * 64 + 96) * 2),
    )


@pytest.mark.parametrize(("kind", "scales"), [("fp8-channel", 5120 + 128 + 512 + 128), ("fp8-block", 40 + 24 + 4 + 2)])
def test_a_target_may_have_fp8_weights(kind: str, scales: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers, E 128, F 256, A 24, H 8, D 128: 5,120 rows of queries, keys and values."""
    monkeypatch.setattr(forward, "WEIGHTS", kind)
    monkeypatch.setitem(forward.MODELS, "qwen3-1.7b", (4, 128, 256, 24))
    workload, size = WORKLOADS["target_forward"], size_of("target_forward", "qwen3-1.7b", 1)
    found = workload.sets(size, "cpu", 1)[0]
    assert set(found) == set(SEAMS["target_forward"].parameters)
    assert {found[f"{name}_weights"][0].dtype for name in ("qkv", "output", "gate_up", "down")} == {torch.float8_e4m3fn}
    stages.target_forward(**found)
    mine = found["out_logits"].float()
    load_reference(_BY_SEAM["target_forward"])(**found)
    wanted = found["out_logits"].float()
    assert bool(wanted.isfinite().all())
    assert float((mine - wanted).norm() / wanted.norm()) < 2**-8
    layer = 5120 * 128 + 3072 * 128 + 3 * 128 * 256
    token = 4 * 2 * 8 * 128 * 2
    assert workload.cost(found).bytes_read == 4 * (layer + 4 * scales) + 96 * 128 * 2 + 40 * token


def _accept_bytes(batch: int, vocab: int, size: int, *, draft: bool | None) -> Cost:
    read = batch * 8 * vocab * size + batch * 8 * 8 + batch * 8 + batch * 4
    if draft is not None:
        read += batch * 7 * vocab * size * draft + 2 * batch * 4 + 8
    return Cost(bytes_read=read, bytes_written=batch * (4 + 8 + 4 + 8 + 8 * 8))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (size_of("draft_block", "greedy", 3), lambda: _draft_bytes(3, 97, 4, sampled=False)),
        (size_of("draft_block", "sampled", 1, "bfloat16"), lambda: _draft_bytes(1, 97, 2, sampled=True)),
        (size_of("greedy_accept", "", 4, "bfloat16"), lambda: _accept_bytes(4, 97, 2, draft=None)),
        (size_of("sampled_accept", "sampled", 2), lambda: _accept_bytes(2, 97, 4, draft=True)),
        (size_of("sampled_accept", "one_hot", 2), lambda: _accept_bytes(2, 97, 4, draft=False)),
        (
            size_of("step_inputs", "", 3),
            lambda: Cost(bytes_read=3 * (8 + 8 + 4 + 8) + 3 * 8 * 4, bytes_written=3 * (8 + 8 + 7) * 8),
        ),
        (size_of("target_forward", "qwen3-1.7b", 3), lambda: _forward_bytes(3)),
    ],
    ids=lambda value: value.text if isinstance(value, Size) else "",
)
def test_bytes_are_counted_once_each(size: Size, expected: Callable[[], Cost]) -> None:
    found = WORKLOADS[size.seam].cost(WORKLOADS[size.seam].sets(size, "cpu", 1)[0])
    assert found.model_copy(update={"note": ""}) == expected()


def test_context_bytes_are_those_of_committed_rows() -> None:
    arguments = WORKLOADS["context_kv"].sets(size_of("context_kv", batch=3), "cpu", 1)[0]
    arguments["commit_lens"] = torch.tensor([1, 0, 8], dtype=torch.int32)
    found = WORKLOADS["context_kv"].cost(arguments)
    row = 5 * 2 * 8 * 128 * 2
    assert found.bytes_written == 9 * row
    assert found.bytes_read == 9 * (row + 8 + 8 + 128 * 4) + 3 * 4 + 5 * 128 * 2


def test_sizes_are_every_combination_that_the_seam_shows() -> None:
    settings = Settings(batches=(1, 4), vocabs=(10, 20), dtypes=("float32",))
    assert [size.text for size in WORKLOADS["greedy_accept"].sizes(settings)] == [
        "greedy_accept B 1 V 10 float32",
        "greedy_accept B 4 V 10 float32",
        "greedy_accept B 1 V 20 float32",
        "greedy_accept B 4 V 20 float32",
        "greedy_accept argmax B 1 V 10 float32",
        "greedy_accept argmax B 4 V 10 float32",
        "greedy_accept argmax B 1 V 20 float32",
        "greedy_accept argmax B 4 V 20 float32",
    ]
    assert len(WORKLOADS["draft_block"].sizes(settings)) == 8
    assert [size.text for size in WORKLOADS["context_kv"].sizes(settings)] == [
        "context_kv B 1",
        "context_kv B 4",
        "context_kv fp8 B 1",
        "context_kv fp8 B 4",
    ]
