"""SGLang's own draft sampler with and without our step: the same tokens, logits, confidence and noise counter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.models.dspark import DSparkConfidenceHead, GatedMarkovHead, RNNHead, VanillaMarkov
from sglang.srt.speculative.dspark_components import dspark_draft_sampler as engine
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise
from torch import Tensor

from sgl_mega_plugin.contract import SlotSetup
from sgl_mega_plugin.engine.draft import sampler as ours
from sgl_mega_plugin.engine.draft.sampler import DraftSampler, head_reasons, mixer_of, model_reasons
from sgl_mega_plugin.registry import Registry, load_reference

GAMMA, MAX_BS, HIDDEN, RANK, VOCAB = 3, 5, 8, 4, 45  # V no multiple of 4, the width of a Philox call
KEY = 0x1234_5678_9ABC_DEF0
IMPOSSIBLE = -7


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang asks the other ranks for the batch sizes they serve, and the GPU whether it captures; there are none."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(engine, "megakernel_agree", lambda value, *, what, group: None)
    monkeypatch.setattr(engine, "get_dp_tp_group", lambda: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SIZES = {"vocab_size": VOCAB, "markov_rank": RANK}
HEADS: dict[str, Any] = {
    "vanilla": lambda: VanillaMarkov(**SIZES),
    "gated": lambda: GatedMarkovHead(**SIZES, hidden_size=HIDDEN),
    "rnn": lambda: RNNHead(**SIZES, hidden_size=HIDDEN),
}


class Model:
    """A draft after SGLang attached the target's LM head. Small integers: every sum is exact in any order."""

    def __init__(self, dtype: torch.dtype, sample_from_anchor: bool, head: Any = "vanilla") -> None:
        draw = torch.Generator().manual_seed(5)
        self.sample_from_anchor = sample_from_anchor
        self.markov_head = (HEADS[head]() if isinstance(head, str) else head).to(dtype).requires_grad_(False)
        self.markov_head.markov_w1.weight[:VOCAB].copy_(_small(draw, VOCAB, RANK))
        self.markov_head.markov_w2.weight.copy_(_small(draw, VOCAB, RANK))
        if (mixer := mixer_of(self.markov_head)) is not None:
            mixer.weight.copy_(_small(draw, *mixer.weight.shape) / 16)
            mixer.bias.copy_(_small(draw, *mixer.bias.shape) / 4)
        self.confidence_head = DSparkConfidenceHead(hidden_size=HIDDEN, markov_rank=RANK).requires_grad_(False)
        self.lm_head = SimpleNamespace(
            weight=_small(draw, VOCAB, HIDDEN).to(dtype), quant_method=None, org_vocab_size=VOCAB
        )

    def compute_base_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden @ self.lm_head.weight.T, hidden

    def compute_confidence(self, *, anchor_tokens: Tensor, draft_tokens: Tensor, confidence_features: Tensor) -> Any:
        return self.confidence_head.predict(
            confidence_features, anchor_tokens=anchor_tokens, draft_tokens=draft_tokens, markov_head=self.markov_head
        )


def _small(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=draw).float()


def _reference(setup: SlotSetup) -> Any:
    assert (setup.max_batch, setup.gamma, setup.vocab_size, setup.device) == (MAX_BS, GAMMA, VOCAB, "cpu")
    reference = load_reference(Registry.discover().get("markov"))

    def call(**arguments: Any) -> None:
        strided = [k for k, v in arguments.items() if isinstance(v, Tensor) and v.shape[-1] > 1 and v.stride(-1) != 1]
        assert set(strided) <= {"anchor_tokens"}, "a kernel takes only arguments with a contiguous last axis"
        reference(**arguments)

    return call


def _ours(model: Model, *, named: bool = False, max_batch: int | None = None) -> DraftSampler:
    return DraftSampler(model=model, slot_name="markov", implementation=_reference, named=named, max_batch=max_batch)


def _sampler(model: Model, *, greedy: bool, megakernel: DraftSampler | None) -> tuple[Any, Tensor]:
    offset = torch.tensor([41], dtype=torch.int64)
    sampler = engine.DsparkDraftSampler(
        model=model,
        gamma=GAMMA,
        max_bs=MAX_BS,
        device="cpu",
        noise=DraftNoise(key=KEY, offset=offset),
        tp_sync=SimpleNamespace(sync=lambda site, tokens: tokens),
        greedy_draft=greedy,
        out=torch.full((MAX_BS * GAMMA,), IMPOSSIBLE, dtype=torch.int64),
        megakernel_sampler=megakernel,
    )
    return sampler, offset


@dataclass(frozen=True)
class Block:
    """What a block leaves behind."""

    tokens: Tensor
    step_logits: Tensor | None
    confidence: Tensor
    offset: int


def _run(sampler: Any, offset: Tensor, model: Model, bs: int, temperatures: list[float]) -> Block:
    draw = torch.Generator().manual_seed(bs)
    rows = GAMMA if model.sample_from_anchor else GAMMA + 1
    hidden = _small(draw, bs * rows, HIDDEN).to(model.lm_head.weight.dtype)
    input_ids = torch.randint(0, VOCAB, (bs * rows,), generator=draw)
    sampler.params.step_temperatures[:bs] = torch.tensor(temperatures)
    sampler(hidden, input_ids)
    logits = None if sampler.step_logits is None else sampler.step_logits[:bs].clone()
    return Block(sampler.out.clone(), logits, sampler.confidence_out[:bs].clone(), int(offset))


CASES = [
    pytest.param(1, [0.0], True, id="greedy-draft-b1"),
    pytest.param(5, [0.0, 0.7, 1.0, 0.0, 1.3], True, id="greedy-draft-ignores-temperatures"),
    pytest.param(1, [0.0], False, id="argmax-row-b1"),
    pytest.param(1, [0.9], False, id="sampled-b1"),
    pytest.param(3, [1.0, 0.0, 0.3], False, id="mixed-b3"),
    pytest.param(5, [0.6, 0.6, 0.6, 0.6, 0.6], False, id="sampled-full-graph"),
]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("from_anchor", [True, False], ids=["from-anchor", "after-anchor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("bs", "temperatures", "greedy"), CASES)
def test_a_step_leaves_what_sglangs_own_block_leaves(
    bs: int, temperatures: list[float], greedy: bool, dtype: torch.dtype, from_anchor: bool, head: str
) -> None:
    model = Model(dtype, from_anchor, head)
    want = _run(*_sampler(model, greedy=greedy, megakernel=None), model, bs, temperatures)
    got = _run(*_sampler(model, greedy=greedy, megakernel=_ours(model)), model, bs, temperatures)
    torch.testing.assert_close(got.tokens, want.tokens, rtol=0, atol=0)
    torch.testing.assert_close(got.confidence, want.confidence, rtol=0, atol=0)
    assert got.tokens[bs * GAMMA :].tolist() == [IMPOSSIBLE] * ((MAX_BS - bs) * GAMMA), "a token past the batch"
    assert got.offset == want.offset == (41 if greedy else 42)
    if greedy:
        assert got.step_logits is None
        return
    assert got.step_logits is not None
    assert want.step_logits is not None
    sampled = [row for row, temperature in enumerate(temperatures) if temperature]
    torch.testing.assert_close(got.step_logits[sampled], want.step_logits[sampled], rtol=0, atol=0)


def test_two_blocks_draw_different_noise() -> None:
    model = Model(torch.float32, True)
    model.lm_head.weight.zero_()  # uniform base logits, so that the noise decides
    model.markov_head.markov_w2.weight.zero_()
    sampler, offset = _sampler(model, greedy=False, megakernel=_ours(model))
    first, second = (_run(sampler, offset, model, 4, [1.0] * 4).tokens[: 4 * GAMMA] for _ in range(2))
    assert not torch.equal(first, second)
    assert len(set(first.view(4, GAMMA)[:, 0].tolist())) > 1, "two rows with equal logits drew alike"


def test_batch_sizes_past_the_slots_largest_stay_with_sglang() -> None:
    model = Model(torch.float32, True)
    sampler, _ = _sampler(model, greedy=True, megakernel=_ours(model, max_batch=2))
    assert [sampler._megakernel_steps(bs) is not None for bs in range(1, MAX_BS + 1)] == [True, True, *[False] * 3]


def _split(model: Model) -> None:
    model.markov_head.vocab_shard = SimpleNamespace(start=0, gather=None)


def _other_vocabulary(model: Model) -> None:
    model.lm_head.org_vocab_size = VOCAB + 3


def _fp16_head(model: Model) -> None:
    model.lm_head.weight = model.lm_head.weight.half()
    model.markov_head.half()


MISFITS = [
    pytest.param(_split, "split over ranks", id="split-head"),
    pytest.param(_other_vocabulary, "the LM head has 48 tokens, the Markov head 45", id="vocabulary"),
    pytest.param(_fp16_head, "torch.float16", id="step-dtype"),
]


@pytest.mark.parametrize(("spoil", "words"), MISFITS)
def test_a_head_that_does_not_fit_declines_every_size_or_stops_the_server(spoil: Any, words: str) -> None:
    model = Model(torch.bfloat16, True)
    spoil(model)
    sizes = {
        "gamma": GAMMA, "max_bs": MAX_BS, "greedy_draft": False, "noise": None,
        "draft_tokens": torch.empty(MAX_BS * GAMMA, dtype=torch.int64),
        "step_logits": torch.empty(MAX_BS, GAMMA, VOCAB, dtype=torch.bfloat16),
        "step_temperatures": torch.zeros(MAX_BS),
    }  # fmt: skip
    steps = _ours(model)(**sizes)
    assert [steps(bs) for bs in range(1, MAX_BS + 1)] == [None] * MAX_BS
    with pytest.raises(RuntimeError, match="slot 'markov' cannot run here") as caught:
        _ours(model, named=True)(**sizes)
    assert words in str(caught.value)


def test_a_head_that_fits_has_no_reasons() -> None:
    model = Model(torch.bfloat16, True)
    assert head_reasons(model, torch.empty(0, dtype=torch.bfloat16)) == []
    assert model_reasons(model) == []


class _OtherHead(VanillaMarkov):
    """A head of somebody else's, which may compute anything."""


@pytest.mark.parametrize("head", HEADS)
def test_a_loaded_head_fits_if_its_weights_agree(head: str) -> None:
    model = Model(torch.bfloat16, True, head)
    assert model_reasons(model) == []
    (mixer_of(model.markov_head) or model.markov_head.markov_w2).half()
    assert "differ in dtype: markov_w1 torch.bfloat16" in model_reasons(model)[0]


def test_a_head_of_another_class_does_not_fit() -> None:
    model = Model(torch.bfloat16, True)
    model.markov_head = _OtherHead(**SIZES)
    assert "a _OtherHead" in model_reasons(model)[0]


def test_anchors_are_handed_over_where_they_are() -> None:
    """SGLang's anchors are column 0 of the draft's inputs; a copy would be one more launch in every step."""
    seen: list[Tensor] = []

    def slot(setup: SlotSetup) -> Any:
        def call(**arguments: Any) -> None:
            seen.append(arguments["anchor_tokens"])
            arguments["out_draft_tokens"].zero_()

        return call

    model = Model(torch.float32, True)
    ours = DraftSampler(model=model, slot_name="markov", implementation=slot, named=False, max_batch=None)
    sampler, _ = _sampler(model, greedy=True, megakernel=ours)
    inputs = torch.arange(2 * GAMMA)
    sampler(torch.zeros(2 * GAMMA, HIDDEN), inputs)
    assert [(anchors.tolist(), anchors.data_ptr()) for anchors in seen] == [([0, GAMMA], inputs.data_ptr())]


class _Head:
    """A head slot by its reference; notes how many rows it was asked for."""

    asked: list[int]

    def __init__(self, setup: SlotSetup) -> None:
        self.reference = load_reference(Registry.discover().get("draft_lm_head"))

    def __call__(self, *, hidden: Tensor, **rest: Any) -> None:
        self.asked.append(hidden.shape[0] * hidden.shape[1])
        self.reference(hidden=hidden, **rest)


def test_a_head_slot_computes_base_logits_up_to_the_rows_it_is_faster_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "HEAD_ROWS", 2 * GAMMA)
    monkeypatch.setattr(ours, "draft_logits_reasons", lambda model: [])
    monkeypatch.setattr(_Head, "asked", [], raising=False)
    model = Model(torch.bfloat16, sample_from_anchor=True)
    model.logits_mup_width_multiplier = None
    head = ours.HeadSlot("draft_lm_head", _Head, named=False)
    tokens = {}
    for name, given in (("slot", head), ("model", None)):
        sampler = DraftSampler(
            model=model,
            slot_name="markov",
            implementation=lambda setup: load_reference(Registry.discover().get("markov")),
            named=False,
            max_batch=None,
            head=given,
        )
        out = torch.full((MAX_BS * GAMMA,), IMPOSSIBLE)
        steps = sampler(
            gamma=GAMMA,
            max_bs=MAX_BS,
            greedy_draft=True,
            noise=DraftNoise(key=KEY, offset=torch.zeros(1, dtype=torch.int64)),
            draft_tokens=out,
            step_logits=None,
            step_temperatures=torch.zeros(MAX_BS),
        )
        found = []
        for bs in (1, 2, 3):
            hidden = _small(torch.Generator().manual_seed(bs), bs * GAMMA, HIDDEN).bfloat16()
            step = steps(bs)
            assert step is not None
            found.append(step(hidden, torch.arange(bs))[0].tolist())
        tokens[name] = found
    assert tokens["slot"] == tokens["model"]
    assert _Head.asked == [GAMMA, 2 * GAMMA]  # three requests are past the rows


@pytest.mark.parametrize("named", [False, True])
def test_a_head_slot_that_does_not_fit_is_left_out_or_refused(
    monkeypatch: pytest.MonkeyPatch, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ours, "draft_logits_reasons", lambda model: ["the LM head is quantized"])
    sampler = DraftSampler(
        model=Model(torch.bfloat16, sample_from_anchor=True),
        slot_name="markov",
        implementation=_Head,
        named=False,
        max_batch=None,
        head=ours.HeadSlot("draft_lm_head", _Head, named=named),
    )
    if named:
        with pytest.raises(RuntimeError, match="slot 'draft_lm_head' cannot run here: the LM head is quantized"):
            sampler._head(device="cpu", max_batch=1, gamma=GAMMA)
        return
    with caplog.at_level("INFO"):
        assert sampler._head(device="cpu", max_batch=1, gamma=GAMMA) is None
    assert "slot 'draft_lm_head' is left out: the LM head is quantized" in caplog.text
