"""The embedded target: a Llama-style decoder that also returns the hidden states a DSpark draft reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sgl_mega_plugin.embedded.layers import Attend, Block, RMSNorm, rope_table
from sgl_mega_plugin.embedded.shape import ModelShape


class TargetConfig(ModelShape):
    """Shape of the target; embeddings and LM head are tied."""


class TargetModel(nn.Module):
    """Hidden state ``taps[i]`` is the output of layer ``taps[i]``, counted from 0, as DSpark checkpoints count."""

    cos_sin: Tensor

    def __init__(self, config: TargetConfig, taps: Sequence[int]) -> None:
        super().__init__()
        wrong = [tap for tap in taps if not 0 <= tap < config.layers]
        if wrong:
            raise ValueError(f"target layers {wrong} are outside [0, {config.layers})")
        self.config, self.taps = config, tuple(taps)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(
            Block(
                config.hidden,
                config.intermediate,
                config.heads,
                config.kv_heads,
                config.head_dim,
                config.rms_eps,
                qk_norm=False,
            )
            for _ in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden, config.rms_eps)
        table = rope_table(config.max_positions, config.head_dim, config.rope_theta)
        self.register_buffer("cos_sin", table, persistent=False)

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, hidden]"""
        return self.embed_tokens.weight

    def embed(self, ids: Tensor) -> Tensor:
        out: Tensor = self.embed_tokens(ids)
        return out

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, *, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``ids`` and ``positions`` [N] -> logits [N, V] (of ``rows`` only, if given) and taps [N, K * hidden]."""
        hidden, taps = self.hidden(ids, positions, attend)
        return self.logits(hidden if rows is None else hidden[rows]), taps

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """``ids`` and ``positions`` [N] -> final-normed hidden states [N, hidden] and taps [N, K * hidden]."""
        x, rope_rows = self.embed(ids), self.cos_sin[positions]
        tapped = {}
        for index, layer in enumerate(self.layers):
            x = layer(index, x, rope_rows, attend)
            if index in self.taps:
                tapped[index] = x
        taps = torch.cat([tapped[tap] for tap in self.taps], dim=-1) if self.taps else x[:, :0]
        return self.norm(x), taps

    def logits(self, hidden: Tensor) -> Tensor:
        """The LM head: [..., hidden] -> [..., V]."""
        return hidden @ self.lm_head_weight.T
