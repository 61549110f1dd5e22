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
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_markov_block

    head = _head(arguments)
    noise = DraftNoise(key=arguments["noise_key"], offset=arguments["noise_offset"].clone())
    step_logits = arguments["out_step_logits"]

    def call() -> Outputs:
        tokens, _ = draft_markov_block(
            markov_head=head,
            base_logits=arguments["base_logits"],
            anchor_tokens=arguments["anchor_tokens"],
            draft_hidden=arguments["draft_hidden"],
            step_temperatures=arguments["temperatures"],
            noise=noise,
            tp_sync=_OneRank(),
            logits_out=step_logits,
            greedy_draft=step_logits is None,
        )
        return {"out_draft_tokens": tokens}  # of the same noise in the first call only: each block advances it

    return call


def _head(arguments: Arguments) -> Any:
    """SGLang's Markov head with the arguments' weights."""
    from sglang.srt.models.dspark import GatedMarkovHead, RNNHead, VanillaMarkov

    (vocab, rank), mixer = arguments["markov_w1"].shape, arguments["mixer_weight"]
    sizes = {"vocab_size": vocab, "markov_rank": rank}
    with torch.device("meta"):
        if mixer is None:
            head, layer = VanillaMarkov(**sizes), None
        else:
            sizes["hidden_size"] = arguments["draft_hidden"].shape[-1]
            head = GatedMarkovHead(**sizes) if len(mixer) == rank else RNNHead(**sizes)
            layer = head.gate_proj if len(mixer) == rank else head.joint_proj
    weights = [(head.markov_w1, "weight", "markov_w1"), (head.markov_w2, "weight", "markov_w2")]
    if layer is not None:
        weights += [(layer, "weight", "mixer_weight"), (layer, "bias", "mixer_bias")]
    for module, name, argument in weights:
        value = arguments[argument]
        setattr(module, name, None if value is None else nn.Parameter(value, requires_grad=False))
    return head


PEERS = {
    "draft_block": (
        engine_peer("engine", "draft_markov_block, which SGLang folds into the draft's graph", _markov_block),
    ),
}
