"""The tensors of a step as `target_step` takes them: the model's own, never a copy, put together from a seam's call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sgl_mega_slots.target.target_step.shape import DenseShape


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are ``[outputs, inputs]``, rows contiguous; all bf16."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [q size + 2 KV sizes, hidden]
    o: Tensor  # [hidden, q size]
    middle_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden], all gates first
    down: Tensor  # [hidden, intermediate]
    qkv_bias: Tensor | None  # [q size + 2 KV sizes]
    q_norm: Tensor | None  # [head dim]
    k_norm: Tensor | None


#: The seam's lists in the order of these fields.
_LISTS = (
    "input_norms", "qkv_weights", "output_weights", "mlp_norms", "gate_up_weights", "down_weights",
    "qkv_biases", "q_norms", "k_norms",
)  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """A decoder. ``rotary`` holds a row a position: cosines of the half head, then sines, fp32."""

    embedding: Tensor  # [vocab, hidden] bf16
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor | None  # [vocab, hidden]; the embedding where the two are tied, None where a step ends before it
    rotary: Tensor  # [positions, head dim] fp32

    def every(self) -> list[Tensor]:
        """All of them, in one order."""
        found = [self.embedding, self.final_norm, self.rotary]
        found += [] if self.head is None else [self.head]
        for layer in self.layers:
            found += [tensor for tensor in vars(layer).values() if tensor is not None]
        return found


@dataclass(frozen=True)
class Cache:
    """Keys and values of every layer, ``[slots, KV heads, head dim]`` bf16."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class StepInputs:
    """What a step reads of its requests. Row ``b * T + t`` is token t of request b."""

    input_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    cache_locs: Tensor  # [rows] int64, slots of this step's keys and values
    seq_lens: Tensor  # [requests] int64, this step's tokens left out
    req_pool_indices: Tensor  # [requests] int64, each request's row of the table
    req_to_token: Tensor  # [*, positions] int32, slots by position, last axis contiguous

    @property
    def requests(self) -> int:
        return self.seq_lens.numel()

    @property
    def tokens(self) -> int:
        """Rows a request."""
        return self.input_ids.numel() // self.requests


@dataclass(frozen=True)
class StepOutputs:
    """Where a step's results go, ``[rows, *]`` bf16; None for what is not wanted."""

    tapped: Tensor | None
    hidden: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True)
class Call:
    """A call of the seam ``target_forward`` or ``draft_forward`` in these words."""

    shape: DenseShape
    weights: Weights
    cache: Cache
    inputs: StepInputs
    outputs: StepOutputs
    taps: tuple[int, ...]


def call_of(a: Mapping[str, Any]) -> Call:
    """Put the arguments of a call of ``target_forward`` together, or of ``draft_forward``, which has some of them.

    Raises:
        ValueError: lists of different lengths, or a tensor whose shape or dtype does not go with the others'.
    """
    kv_heads, head_dim = a["out_keys"][0].shape[1:]
    vocab, hidden = a["embedding"].shape
    shape = DenseShape(
        layers=len(a["qkv_weights"]),
        hidden=hidden,
        intermediate=a["down_weights"][0].shape[1],
        q_heads=a["output_weights"][0].shape[1] // head_dim,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        eps=a["eps"],
        qk_norm=a["q_norms"] is not None,
        qkv_bias=a["qkv_biases"] is not None,
    )
    nothing = [None] * shape.layers
    lists = [nothing if a[name] is None else a[name] for name in _LISTS]
    layers = tuple(LayerWeights(*of_layer) for of_layer in zip(*lists, strict=True))
    call = Call(
        shape=shape,
        weights=Weights(a["embedding"], layers, a["final_norm"], a.get("lm_head_weight"), a["cos_sin"]),
        cache=Cache(tuple(a["out_keys"]), tuple(a["out_values"])),
        inputs=StepInputs(**{field.name: a[field.name] for field in fields(StepInputs)}),
        outputs=StepOutputs(a.get("out_tapped"), a["out_hidden"], a.get("out_logits")),
        taps=tuple(a.get("taps", ())),
    )
    _check(call)
    return call


def _check(call: Call) -> None:
    shape, bf16 = call.shape, torch.bfloat16
    wanted: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("final_norm", call.weights.final_norm, (shape.hidden,), bf16),
        ("lm_head_weight", call.weights.head, (shape.vocab, shape.hidden), bf16),
        ("embedding", call.weights.embedding, (shape.vocab, shape.hidden), bf16),
        ("cos_sin", call.weights.rotary, (call.weights.rotary.shape[0], shape.head_dim), torch.float32),
    ]
    for index, layer in enumerate(call.weights.layers):
        sizes = {
            "input_norm": (shape.hidden,),
            "qkv": (shape.qkv_size, shape.hidden),
            "o": (shape.hidden, shape.q_size),
            "middle_norm": (shape.hidden,),
            "gate_up": (2 * shape.intermediate, shape.hidden),
            "down": (shape.hidden, shape.intermediate),
            "qkv_bias": (shape.qkv_size,),
            "q_norm": (shape.head_dim,),
            "k_norm": (shape.head_dim,),
        }
        wanted += [(f"{name} of layer {index}", getattr(layer, name), size, bf16) for name, size in sizes.items()]
        for name, caches in (("out_keys", call.cache.keys), ("out_values", call.cache.values)):
            slots = (call.cache.keys[0].shape[0], shape.kv_heads, shape.head_dim)
            wanted.append((f"{name}[{index}]", caches[index], slots, bf16))
    rows = call.inputs.input_ids.numel()
    wanted += [
        ("out_tapped", call.outputs.tapped, (rows, len(call.taps) * shape.hidden), bf16),
        ("out_hidden", call.outputs.hidden, (rows, shape.hidden), bf16),
        ("out_logits", call.outputs.logits, (rows, shape.vocab), bf16),
    ]
    for name, value, size, dtype in wanted:
        if value is not None and (tuple(value.shape) != size or value.dtype != dtype or not value.is_contiguous()):
            raise ValueError(f"{name}: {value.dtype} {tuple(value.shape)}; must be contiguous {dtype} {size}")
    if (call.outputs.tapped is None) != (not call.taps):
        raise ValueError(f"out_tapped goes with taps: {list(call.taps)} and {call.outputs.tapped is not None}")
    if (call.outputs.hidden is None) == (call.outputs.logits is None):
        raise ValueError("one of out_hidden and out_logits is asked for, and not both")
