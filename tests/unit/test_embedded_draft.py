"""What the draft sees through pages and seams equals a dense computation of the DSpark block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from embedded_tiny import tiny_models
from torch import Tensor

from sgl_mega_plugin.embedded import Engine, Request, stages

GAMMA = 4
# Two fp32 models of two layers in another order of sums: errors near 1e-6 of logits near 10.
TOLERANCE = 1e-4


class Dense:
    """Attention over explicit tensors: causal, or over ``context`` ((k, v) a layer) and the whole block."""

    def __init__(self, context: list[tuple[Tensor, Tensor]] | None = None) -> None:
        self._context = context

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = self._context is None
        if self._context is not None:
            k, v = (torch.cat([old, new]) for old, new in zip(self._context[layer], (k, v), strict=True))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out[0].transpose(0, 1)


def test_base_logits_equal_a_dense_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    models = tiny_models(gamma=GAMMA)
    seen: list[Tensor] = []
    block = stages.draft_block

    def watch(**arguments: Any) -> None:
        seen.append(arguments["base_logits"].clone())
        block(**arguments)

    monkeypatch.setattr(stages, "draft_block", watch)
    requests = [
        Request(prompt_ids=tuple(range(2, 2 + length)), max_new_tokens=12, ignore_eos=True) for length in (5, 11)
    ]
    completions = Engine(models, page_size=16, pad_to=3, max_batch=2).generate(requests)
    for index, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        assert request.prompt_ids is not None
        known, emitted = [*request.prompt_ids, *completion.tokens], 1
        for step in range(min(c.steps for c in completions)):  # until then both are in the batch, in order
            wanted = dense_base_logits(models, known[: len(request.prompt_ids) + emitted])
            error = (seen[step][index] - wanted).abs().max().item()
            assert error < TOLERANCE, f"request {index} step {step}: error {error}, bound {TOLERANCE}"
            emitted += completion.accept_lengths[step]


def dense_base_logits(models: Any, ids: list[int]) -> Tensor:
    """[G, V] of the block after ``ids``, whose last is the anchor."""
    target, draft = models.target, models.draft
    length = len(ids) - 1
    positions = torch.arange(length)
    _, taps = target(torch.tensor(ids[:-1]), positions, Dense())
    raw = draft.context_kv(draft.project_context(taps))
    keys = draft.normed_context_keys(raw[:, :, 0], positions)
    context = [(keys[:, layer], raw[:, layer, 1]) for layer in range(draft.config.layers)]
    block = torch.tensor([ids[-1]] + [draft.config.mask_token] * (GAMMA - 1))
    hidden = draft(target.embed(block), length + torch.arange(GAMMA), Dense(context))
    return hidden @ target.lm_head_weight.T


def test_heads_that_do_not_group_are_refused_by_both_shapes() -> None:
    models = tiny_models()
    for config in (models.target.config, models.draft.config):
        with pytest.raises(ValueError, match="heads 4 is no multiple of kv_heads 3"):
            type(config)(**config.model_dump() | {"kv_heads": 3})
