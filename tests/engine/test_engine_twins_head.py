"""The LM head's slots against SGLang's own code on the CPU: draft, logits processor, peers and binding."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.models import dspark
from sglang.srt.models.dspark import DSparkDraftMixin
from torch import Tensor

from sgl_mega_plugin.bench.records import Size
from sgl_mega_plugin.bench.workloads import WORKLOADS, sizes
from sgl_mega_plugin.contract import SlotSetup
from sgl_mega_plugin.engine.draft.head import DraftHead, draft_logits_reasons
from sgl_mega_plugin.engine.peers import engine_peers
from sgl_mega_plugin.registry import Registry, load_reference

BATCH, GAMMA, HIDDEN, VOCAB, PADDED = 3, 4, 24, 45, 64
_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang gathers the vocabulary over the ranks; there is one."""
    monkeypatch.setattr(dspark, "tensor_model_parallel_all_gather", lambda values, dim: values)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _call(slot: str, **arguments: Any) -> None:
    load_reference(Registry.discover().get(slot))(**arguments)


def _small(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Integers, of which every sum is exact and ties occur."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _lm_head(dtype: torch.dtype, rows: int = PADDED) -> SimpleNamespace:
    weight = _small(2, rows, HIDDEN, dtype=dtype)
    weight[VOCAB:] = 1000.0  # would win if it were read
    return SimpleNamespace(weight=weight, quant_method=None, org_vocab_size=VOCAB)


class Draft(DSparkDraftMixin):  # type: ignore[misc]  # untyped
    """As much of a loaded draft as the base logits read."""

    def __init__(self, lm_head: Any, multiplier: float | None = None) -> None:
        self.lm_head, self.logits_mup_width_multiplier = lm_head, multiplier
        self.markov_head, self._base_logits_gatherer = SimpleNamespace(vocab_shard=None), None


@_DTYPES
@pytest.mark.parametrize("multiplier", [None, 1.0, 4.0])
def test_draft_lm_head_is_compute_base_logits(dtype: torch.dtype, multiplier: float | None) -> None:
    draft, hidden = Draft(_lm_head(dtype), multiplier), _small(1, BATCH * GAMMA, HIDDEN, dtype=dtype)
    logits, _ = draft.compute_base_logits(hidden)
    out = torch.full((BATCH, GAMMA, VOCAB), float("nan"), dtype=dtype)
    tokens = torch.full((BATCH, GAMMA), -7)
    _call(
        "draft_lm_head",
        hidden=hidden.view(BATCH, GAMMA, HIDDEN),
        lm_head_weight=draft.lm_head.weight,
        divisor=multiplier or 1.0,
        vocab_size=VOCAB,
        out_logits=out,
        out_tokens=tokens,
    )
    torch.testing.assert_close(out.view_as(logits), logits, rtol=0, atol=0)
    assert tokens.flatten().tolist() == logits.argmax(-1).tolist()


def test_a_multiplier_that_is_no_power_of_two_differs_by_a_rounding_from_sglangs_cpu() -> None:
    """torch divides on a CPU and multiplies by fp32(1 / 3) on a GPU, which is the seam's way."""
    draft = Draft(_lm_head(torch.float32), 3.0)
    hidden = torch.rand(BATCH * GAMMA, HIDDEN, generator=torch.Generator().manual_seed(1)) * 8 - 4
    logits, _ = draft.compute_base_logits(hidden)
    out = torch.empty(BATCH, GAMMA, VOCAB)
    _call(
        "draft_lm_head",
        hidden=hidden.view(BATCH, GAMMA, HIDDEN),
        lm_head_weight=draft.lm_head.weight,
        divisor=3.0,
        vocab_size=VOCAB,
        out_logits=out,
        out_tokens=None,
    )
    # Each quotient within 2 roundings of 2**-24, each of H sums within one: of at most H products of 4 * 4 / 3.
    bound = (2 + HIDDEN) * 2.0**-24 * HIDDEN * 16 / 3
    torch.testing.assert_close(out.view_as(logits), logits, rtol=0, atol=bound)
    ours, theirs = hidden * torch.tensor(3.0).reciprocal(), hidden / 3.0
    assert not torch.equal(ours, theirs), "the two ways agree, so the seam need not choose"


def _target_logits(hidden: Tensor, lm_head: Any, softcap: float | None = None) -> Tensor:
    """fp32 logits [N, V] of SGLang's logits processor on one rank."""
    processor = LogitsProcessor.__new__(LogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.use_fp32_lm_head = processor.use_fp32_lm_head_output = False
    processor.rl_on_policy_target = None
    processor.vocab_size = VOCAB
    logits = processor._compute_lm_head(hidden, lm_head)
    found: Tensor = processor._copy_logits_to_buffer(logits, SimpleNamespace(next_token_logits_buffer=None))
    return found if softcap is None else softcap * torch.tanh(found / softcap)


def _target_tokens(hidden: Tensor, weight: Tensor, verify_lens: list[int], rows: int) -> Tensor:
    out = torch.full((len(verify_lens), rows), -7)
    _call(
        "target_argmax_head",
        hidden=hidden,
        lm_head_weight=weight,
        divisor=1.0,
        vocab_size=VOCAB,
        verify_lens=torch.tensor(verify_lens, dtype=torch.int32),
        out_tokens=out,
    )
    return out


@_DTYPES
def test_target_argmax_head_is_the_logits_processor_and_an_argmax(dtype: torch.dtype) -> None:
    lm_head, hidden = _lm_head(dtype), _small(1, BATCH * GAMMA, HIDDEN, dtype=dtype)
    expected = _target_logits(hidden, lm_head).argmax(-1).view(BATCH, GAMMA)
    assert _target_tokens(hidden, lm_head.weight, [GAMMA] * BATCH, GAMMA).tolist() == expected.tolist()
    expected[1, 2:] = 0  # SGLang computes rows that no request has, and leaves whatever comes out
    expected[2] = 0
    assert _target_tokens(hidden, lm_head.weight, [GAMMA, 2, 0], GAMMA).tolist() == expected.tolist()


def test_nan_wins_in_torchs_argmax_and_not_in_the_seams() -> None:
    """An id that is NaN would be committed; the seam takes the best of what is a number."""
    lm_head, hidden = _lm_head(torch.float32), torch.ones(2, HIDDEN)
    lm_head.weight[:VOCAB] = -1.0
    lm_head.weight[7] = float("nan")
    lm_head.weight[9] = 1.0
    assert _target_logits(hidden, lm_head).argmax(-1).tolist() == [7, 7]
    assert _target_tokens(hidden, lm_head.weight, [2], 2).tolist() == [[9, 9]]


def test_a_soft_cap_keeps_the_order_until_it_rounds_to_a_tie() -> None:
    """Why the seam leaves a soft cap to be declined: ids 8 and 9 saturate, and the lower one wins there."""
    lm_head, hidden = _lm_head(torch.float32), torch.ones(2, HIDDEN)
    lm_head.weight[:VOCAB] = 0.0
    for cap, agrees in ((1.0, False), (100.0, True)):
        lm_head.weight[8], lm_head.weight[9] = 20.0 / HIDDEN, 21.0 / HIDDEN
        capped = _target_logits(hidden, lm_head, softcap=cap).argmax(-1).tolist()
        assert capped == ([9, 9] if agrees else [8, 8])
    assert _target_tokens(hidden, lm_head.weight, [2], 2).tolist() == [[9, 9]]


@pytest.mark.parametrize(
    ("seam", "variant", "slot"),
    [("draft_logits", "tokens", "draft_lm_head"), ("target_argmax", "", "target_argmax_head")],
)
def test_a_peer_computes_what_the_slot_does(
    monkeypatch: pytest.MonkeyPatch, seam: str, variant: str, slot: str
) -> None:
    monkeypatch.setattr(sizes, "HIDDEN", HIDDEN)
    size = Size(seam=seam, variant=variant, batch=BATCH, vocab=97, dtype="float32")
    (arguments,) = WORKLOADS[seam].sets(size, "cpu", 1)
    expected = arguments | {"out_tokens": torch.full_like(arguments["out_tokens"], -7)}
    _call(slot, **expected)
    for peer in engine_peers(seam):
        found = peer.prepare(arguments)()
        assert found is not None, peer.name
        assert found["out_tokens"].tolist() == expected["out_tokens"].tolist(), peer.name


def test_the_logits_peer_projects_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns nothing to compare, so its product is looked at."""
    monkeypatch.setattr(sizes, "HIDDEN", HIDDEN)
    seen: list[Tensor] = []
    project = dspark.project_through_lm_head

    def looked_at(hidden: Tensor, lm_head: Any) -> Tensor:
        seen.append(project(hidden, lm_head))
        return seen[-1]

    monkeypatch.setattr(dspark, "project_through_lm_head", looked_at)
    size = Size(seam="draft_logits", variant="logits", batch=BATCH, vocab=97, dtype="float32")
    (arguments,) = WORKLOADS["draft_logits"].sets(size, "cpu", 1)
    (peer,) = engine_peers("draft_logits")
    assert peer.prepare(arguments)() == {}
    _call("draft_lm_head", **arguments)
    # Another order of a sum of H products of unit variance over H: far below H * 2**-24 * 8.
    torch.testing.assert_close(seen[0].view_as(arguments["out_logits"]), arguments["out_logits"], rtol=0, atol=1e-5)


def _reference(setup: SlotSetup) -> Any:
    assert (setup.max_batch, setup.gamma, setup.vocab_size, setup.device) == (8, GAMMA, VOCAB, "cpu")
    return load_reference(Registry.discover().get("draft_lm_head"))


@_DTYPES
@pytest.mark.parametrize("multiplier", [None, 2.0])
def test_the_binding_gives_what_the_model_gives(dtype: torch.dtype, multiplier: float | None) -> None:
    draft, hidden = Draft(_lm_head(dtype), multiplier), _small(1, BATCH * GAMMA, HIDDEN, dtype=dtype)
    assert draft_logits_reasons(draft) == []
    head = DraftHead.build(draft, _reference, device="cpu", max_batch=8, gamma=GAMMA)
    logits, features = head.base_logits(hidden)
    expected, expected_features = draft.compute_base_logits(hidden)
    assert logits.shape == (BATCH, GAMMA, VOCAB)
    torch.testing.assert_close(logits.view_as(expected), expected, rtol=0, atol=0)
    assert features is hidden
    assert expected_features is hidden


class _Own(Draft):
    def compute_base_logits(self, hidden: Tensor) -> Any:
        return hidden, hidden


class _Marlin:
    """A quantized head's method, as SGLang tells one."""

    def apply(self, layer: Any, hidden: Tensor, bias: Tensor | None) -> Tensor:
        return hidden


def _split() -> Draft:
    draft = Draft(_lm_head(torch.bfloat16))
    draft.markov_head.vocab_shard = SimpleNamespace(start=0)
    return draft


def _head(**changed: Any) -> Draft:
    return Draft(SimpleNamespace(**vars(_lm_head(torch.bfloat16)) | changed))


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (_Own(_lm_head(torch.bfloat16)), "_Own has a compute_base_logits of its own"),
        (Draft(None), "no LM head is attached"),
        (_head(quant_method=_Marlin()), "is quantized"),
        (_head(weight=torch.zeros(PADDED, HIDDEN, dtype=torch.uint8)), "dtype torch.uint8"),
        (_head(weight=torch.zeros(HIDDEN, PADDED).T), "strides (1, 64)"),
        (_head(weight=torch.zeros(VOCAB - 1, HIDDEN)), "has 44 of 45 rows here"),
        (_split(), "split over ranks"),
    ],
    ids=["own-method", "no-head", "quantized", "dtype", "strides", "half-a-vocabulary", "shard"],
)
def test_what_no_slot_can_serve_is_a_reason(draft: Draft, says: str) -> None:
    (reason,) = draft_logits_reasons(draft)
    assert says in reason
