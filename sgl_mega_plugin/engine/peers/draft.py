"""SGLang's draft stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sgl_mega_plugin.engine.peers.peer import Arguments, Call, Outputs, engine_peer


class _OneRank:
    """SGLang's agreement between ranks, where there is one rank."""

    def sync(self, site: Any, values: Tensor) -> Tensor:
        return values


def _markov_block(arguments: Arguments) -> Call:
    from sglang.srt.models.dspark import VanillaMarkov
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_markov_block

    vocab, rank = arguments["markov_w1"].shape
    with torch.device("meta"):
        head = VanillaMarkov(vocab_size=vocab, markov_rank=rank)
    head.markov_w1.weight = nn.Parameter(arguments["markov_w1"], requires_grad=False)
    head.markov_w2.weight = nn.Parameter(arguments["markov_w2"], requires_grad=False)
    noise = DraftNoise(key=arguments["noise_key"], offset=arguments["noise_offset"].clone())
    step_logits = arguments["out_step_logits"]

    def call() -> Outputs:
        tokens, _ = draft_markov_block(
            markov_head=head,
            base_logits=arguments["base_logits"],
            anchor_tokens=arguments["anchor_tokens"],
            draft_hidden=None,
            step_temperatures=arguments["temperatures"],
            noise=noise,
            tp_sync=_OneRank(),
            logits_out=step_logits,
            greedy_draft=step_logits is None,
        )
        return {"out_draft_tokens": tokens}  # of the same noise in the first call only: each block advances it

    return call


PEERS = {
    "draft_block": (
        engine_peer("engine", "draft_markov_block, which SGLang folds into the draft's graph", _markov_block),
    ),
}
