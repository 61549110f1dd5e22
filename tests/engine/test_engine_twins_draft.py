"""The definition of a draft block against SGLang's own heads and step, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative.dspark.markov_sample import MarkovSampleStep
from sglang.srt.models.dspark import GatedMarkovHead, RNNHead
from torch import Tensor

from sgl_mega_plugin.embedded.stages.draft import draft_block as stage
from sgl_mega_plugin.engine.draft.sampler import mixer_of
from sgl_mega_slots.draft.markov.reference import draft_block, mixed

BATCH, GAMMA, VOCAB, RANK, HIDDEN = 3, 5, 61, 8, 20
HEADS = {"gated": GatedMarkovHead, "rnn": RNNHead}
#: Another order of a sum of fp32 may round the other way, once each in the sum, the sigmoid, a product and a sum.
ROUNDINGS = {torch.float32: 4 * 2.0**-22, torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}


def _head(kind: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(4)
    head = HEADS[kind](vocab_size=VOCAB, markov_rank=RANK, hidden_size=HIDDEN)
    return head.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", HEADS)
def test_factors_and_states_are_those_of_sglangs_heads(kind: str, dtype: torch.dtype) -> None:
    head = _head(kind, dtype)
    mixer = mixer_of(head)
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, GAMMA, HIDDEN, generator=draw).to(dtype)
    seen: list[Tensor] = []
    head.project_bias = lambda factors: seen.append(factors) or factors
    state = head.init_state(hidden)
    ours = torch.zeros(BATCH, RANK, dtype=dtype)
    for step in range(GAMMA):
        tokens = torch.randint(0, VOCAB, (BATCH,), generator=draw)
        _, state = head.step_bias(tokens, hidden_states=hidden[:, step], state=state)
        factors, ours = mixed(head.markov_w1(tokens), ours, hidden[:, step], mixer.weight, mixer.bias)
        assert factors.dtype is dtype
        bound = (step + 1) * ROUNDINGS[dtype]
        size = float(seen[-1].abs().max())
        torch.testing.assert_close(factors, seen[-1], rtol=0, atol=bound * size)
        if state is not None:
            torch.testing.assert_close(ours, state, rtol=0, atol=bound * float(state.abs().max()))


def _block(call: Any, head: Any, base: Tensor, hidden: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    mixer = mixer_of(head)
    tokens = torch.full(base.shape[:2], -7)
    features = torch.full((*base.shape[:2], RANK), torch.nan, dtype=base.dtype)
    call(
        base_logits=base,
        anchor_tokens=torch.tensor([[3, 5], [-1, 5], [VOCAB, 5]])[:, 0],
        markov_w1=head.markov_w1.weight,
        markov_w2=head.markov_w2.weight,
        draft_hidden=hidden,
        mixer_weight=mixer.weight,
        mixer_bias=mixer.bias,
        temperatures=temperatures,
        noise_key=11,
        noise_offset=torch.tensor([2]),
        out_draft_tokens=tokens,
        out_step_logits=None,
        out_features=features,
    )
    return tokens, features


@pytest.mark.parametrize("kind", HEADS)
def test_the_embedded_engines_stage_is_the_reference(kind: str) -> None:
    """Two implementations that share no code; anchors out of range and the features as well."""
    head, draw = _head(kind, torch.float32), torch.Generator().manual_seed(2)
    base = torch.randn(BATCH, GAMMA, VOCAB, generator=draw)
    hidden = torch.randn(BATCH, GAMMA, HIDDEN, generator=draw)
    temperatures = torch.tensor([0.7, 0.0, 1.0])
    tokens, features = _block(draft_block, head, base, hidden, temperatures)
    theirs, theirs_features = _block(stage, head, base, hidden, temperatures)
    assert tokens.tolist() == theirs.tolist()
    assert torch.equal(features, theirs_features)
    assert features[1:, 0].eq(0).all(), "an anchor outside the vocabulary has a feature"
    assert torch.equal(features[:, 1:], head.markov_w1(tokens[:, :-1]))


def test_a_nan_wins_in_sglang_and_never_here() -> None:
    """A difference on purpose: an id whose logit is no number is one that the model did not choose."""
    base = torch.zeros(1, 1, 5)
    base[0, 0, 1], base[0, 0, 3] = torch.nan, 2.0
    theirs = MarkovSampleStep.torch(
        base_logits=base[:, 0],
        bias=torch.zeros(1, 5),
        temperatures=torch.zeros(1),
        key=1,
        offset=torch.tensor([0]),
        step=0,
        step_dtype=torch.float32,
    )
    ours = torch.full((1, 1), -7)
    nothing = torch.zeros(5, RANK)
    draft_block(
        base_logits=base,
        anchor_tokens=torch.tensor([0]),
        markov_w1=nothing,
        markov_w2=nothing,
        draft_hidden=None,
        mixer_weight=None,
        mixer_bias=None,
        temperatures=torch.zeros(1),
        noise_key=1,
        noise_offset=torch.tensor([0]),
        out_draft_tokens=ours,
        out_step_logits=None,
        out_features=None,
    )
    assert [theirs.tolist(), ours.flatten().tolist()] == [[1], [3]]
