"""The embedded DSpark draft, in the checkpoint format that SGLang's ``Qwen3DSparkModel`` loads.

A few Qwen3-style layers read the target's tapped hidden states as context KV and fill a block of
mask tokens at once; a low-rank Markov head corrects each token by the one before it, and a
confidence head scores it. Embedding and LM head are the target's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from sgl_mega_plugin.embedded.layers import Attend, Block, RMSNorm, rope_table, rotate
from sgl_mega_plugin.embedded.shape import ModelShape


class DraftConfig(ModelShape):
    """Shape of the draft, read from and written to the ``config.json`` of a DSpark checkpoint."""

    gamma: int = Field(ge=1)
    mask_token: int = Field(ge=0)
    markov_rank: int = Field(ge=1)
    target_layers: int = Field(ge=1)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)

    @classmethod
    def from_checkpoint(cls, raw: dict[str, Any]) -> Self:
        """From the fields of a DSpark ``config.json``; a head type other than vanilla is refused."""
        head = raw.get("markov_head_type", "vanilla")
        if head != "vanilla":
            raise ValueError(f"markov_head_type {head!r} is not 'vanilla', the one that the embedded engine runs")
        return cls.model_validate({ours: raw[theirs] for ours, theirs in _FIELDS})

    def to_checkpoint(self) -> dict[str, Any]:
        """The fields of a DSpark ``config.json`` that SGLang reads."""
        values = self.model_dump()
        return {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "layer_types": ["full_attention"] * self.layers,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            **{theirs: values[ours] for ours, theirs in _FIELDS},
        }


_FIELDS = (
    ("vocab_size", "vocab_size"),
    ("hidden", "hidden_size"),
    ("layers", "num_hidden_layers"),
    ("heads", "num_attention_heads"),
    ("kv_heads", "num_key_value_heads"),
    ("head_dim", "head_dim"),
    ("intermediate", "intermediate_size"),
    ("rms_eps", "rms_norm_eps"),
    ("rope_theta", "rope_theta"),
    ("max_positions", "max_position_embeddings"),
    ("gamma", "block_size"),
    ("mask_token", "mask_token_id"),
    ("markov_rank", "markov_rank"),
    ("target_layers", "num_target_layers"),
    ("target_layer_ids", "target_layer_ids"),
)


class MarkovHead(nn.Module):
    """Bias of the next token's logits: ``markov_w1[previous] @ markov_w2.T``."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """Logit of a drafted token's acceptance, from its hidden state and the previous token's embedding."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, 1)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """``hidden`` [..., hidden], ``previous`` [..., R] -> [...] fp32."""
        features = torch.cat([hidden, previous.to(hidden.dtype)], dim=-1)
        out: Tensor = self.proj(features.to(self.proj.weight.dtype)).squeeze(-1)
        return out.float()


class DraftModel(nn.Module):
    """See the module docstring. N rows are the rows of a draft block, or the context's tokens."""

    cos_sin: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden, config.hidden, bias=False)
        self.hidden_norm = RMSNorm(config.hidden, config.rms_eps)
        self.layers = nn.ModuleList(
            Block(
                config.hidden,
                config.intermediate,
                config.heads,
                config.kv_heads,
                config.head_dim,
                config.rms_eps,
                qk_norm=True,
            )
            for _ in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden, config.rms_eps)
        self.markov_head = MarkovHead(config.vocab_size, config.markov_rank)
        self.confidence_head = ConfidenceHead(config.hidden, config.markov_rank)
        table = rope_table(config.max_positions, config.head_dim, config.rope_theta)
        self.register_buffer("cos_sin", table, persistent=False)
        self._stacked: tuple[tuple[tuple[int, int], ...], Tensor] | None = None

    @property
    def rms_eps(self) -> float:
        return self.config.rms_eps

    @property
    def markov_w1(self) -> Tensor:
        """[V, R]"""
        return self.markov_head.markov_w1.weight

    @property
    def markov_w2(self) -> Tensor:
        """[V, R]"""
        return self.markov_head.markov_w2.weight

    @property
    def k_norm_weights(self) -> Tensor:
        """[L, D]"""
        return torch.stack([layer.get_parameter("self_attn.k_norm.weight") for layer in self.layers])

    def project_context(self, taps: Tensor) -> Tensor:
        """Tapped hidden states [N, K * hidden] -> [N, hidden]."""
        out: Tensor = self.hidden_norm(self.fc(taps))
        return out

    def context_kv(self, context: Tensor) -> Tensor:
        """[N, hidden] -> [N, L, 2, H, D]: every layer's k and v, before k's norm and rotation."""
        flat = context @ self._stacked_kv_weight().T
        kv: Tensor = flat.unflatten(-1, (self.config.layers, 2, self.config.kv_heads, self.config.head_dim))
        return kv

    def _stacked_kv_weight(self) -> Tensor:
        """[L * 2 * H * D, hidden]: joined once for weights that are not trained, anew after they changed."""
        weights: list[Tensor] = []
        for layer in self.layers:
            weights += [layer.get_parameter("self_attn.k_proj.weight"), layer.get_parameter("self_attn.v_proj.weight")]
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            return torch.cat(weights)
        version = tuple((weight.data_ptr(), weight._version) for weight in weights)
        if self._stacked is None or self._stacked[0] != version:
            self._stacked = version, torch.cat(weights)
        return self._stacked[1]

    def normed_context_keys(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Raw context keys [N, L, H, D] -> normed and rotated, as the cache holds them."""
        rows = self.cos_sin[positions]
        normed = [
            rotate(layer.get_submodule("self_attn.k_norm")(keys[:, index]), rows)
            for index, layer in enumerate(self.layers)
        ]
        return torch.stack(normed, dim=1)

    def forward(self, embeds: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Block inputs [N, hidden] at ``positions`` [N] -> final-normed hidden states [N, hidden]."""
        x, rope_rows = embeds, self.cos_sin[positions]
        for index, layer in enumerate(self.layers):
            x = layer(index, x, rope_rows, attend)
        out: Tensor = self.norm(x)
        return out

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` (bf16)."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config.to_checkpoint(), indent=2) + "\n")
        weights = {
            name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in self.named_parameters()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a checkpoint folder; a missing file or an unexpected weight is an error."""
        from safetensors.torch import load_file

        config_file, weights_file = folder / "config.json", folder / "model.safetensors"
        missing = [str(file) for file in (config_file, weights_file) if not file.exists()]
        if missing:
            raise FileNotFoundError(f"draft checkpoint: no {' and no '.join(missing)}")
        model = cls(DraftConfig.from_checkpoint(json.loads(config_file.read_text())))
        model.load_state_dict(load_file(weights_file))
        return model
