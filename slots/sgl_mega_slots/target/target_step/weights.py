"""The tensors of a step as `target_step` takes them: the model's own, never a copy, put together from a seam's call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sgl_mega_slots.target.target_step.shape import SCALE_BLOCK, DenseShape, WeightKind


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are ``[outputs, inputs]``, rows contiguous; all bf16, or the four matrices fp8 (e4m3) with
    fp32 scales, ``[outputs]`` or ``[outputs / 128, inputs / 128]`` rounded up.
    """

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [q size + 2 KV sizes, hidden]
    o: Tensor  # [hidden, q size]
    middle_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden], all gates first
    down: Tensor  # [hidden, intermediate]
    qkv_bias: Tensor | None  # [q size + 2 KV sizes]
    q_norm: Tensor | None  # [head dim]
    k_norm: Tensor | None
    qkv_scales: Tensor | None = None
    o_scales: Tensor | None = None
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None

    def dequantised(self) -> LayerWeights:
        """This layer with matrices in fp32 and without scales; itself where it has none."""
        if self.qkv_scales is None:
            return self
        changes: dict[str, Any] = {}
        for name in MATRICES:
            changes[name] = dequantised(getattr(self, name), getattr(self, f"{name}_scales"))
            changes[f"{name}_scales"] = None
        return replace(self, **changes)


#: A layer's matrices in the order of its operations.
MATRICES = ("qkv", "o", "gate_up", "down")


def dequantised(matrix: Tensor, scales: Tensor) -> Tensor:
    """fp8 weights ``[outputs, inputs]`` times their scales, in fp32."""
    if scales.dim() == 1:
        return matrix.float() * scales[:, None]
    rows, columns = matrix.shape
    by_row = scales.repeat_interleave(SCALE_BLOCK, dim=0)[:rows]
    return matrix.float() * by_row.repeat_interleave(SCALE_BLOCK, dim=1)[:, :columns]


#: The seam's lists in the order of these fields.
_LISTS = (
    "input_norms", "qkv_weights", "output_weights", "mlp_norms", "gate_up_weights", "down_weights",
    "qkv_biases", "q_norms", "k_norms", "qkv_scales", "output_scales", "gate_up_scales", "down_scales",
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
    """Keys and values of every layer, ``[slots, KV heads, head dim]`` bf16, or float8_e4m3fn."""

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
        kv_fp8=a["out_keys"][0].dtype == torch.float8_e4m3fn,
        weights=_kind_of(a),
    )
    nothing = [None] * shape.layers
    lists = [nothing if a.get(name) is None else a[name] for name in _LISTS]
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


def _kind_of(a: Mapping[str, Any]) -> WeightKind:
    """The kind of weights, by the first matrix's scales; :func:`_check` sees to the others."""
    given = {name: a.get(name) is not None for name in _LISTS if name.endswith("_scales")}
    if not any(given.values()):
        return WeightKind.BF16
    if not all(given.values()):
        without = ", ".join(name for name, is_given in given.items() if not is_given)
        raise ValueError(f"scales go with all four matrices of a layer or with none; {without} are not given")
    return WeightKind.FP8_CHANNEL if a["qkv_scales"][0].dim() == 1 else WeightKind.FP8_BLOCK


def _check(call: Call) -> None:
    shape, bf16 = call.shape, torch.bfloat16
    weight_dtype = bf16 if shape.weights is WeightKind.BF16 else torch.float8_e4m3fn
    wanted: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("final_norm", call.weights.final_norm, (shape.hidden,), bf16),
        ("lm_head_weight", call.weights.head, (shape.vocab, shape.hidden), bf16),
        ("embedding", call.weights.embedding, (shape.vocab, shape.hidden), bf16),
        ("cos_sin", call.weights.rotary, (call.weights.rotary.shape[0], shape.head_dim), torch.float32),
    ]
    for index, layer in enumerate(call.weights.layers):
        for name, matrix in zip(MATRICES, shape.matrices, strict=True):
            wanted.append((f"{name} of layer {index}", getattr(layer, name), matrix, weight_dtype))
            if (scales := shape.weights.scales_of(*matrix)) is not None:
                found = getattr(layer, f"{name}_scales")
                wanted.append((f"{name}_scales of layer {index}", found, scales, torch.float32))
        sizes = {
            "input_norm": (shape.hidden,),
            "middle_norm": (shape.hidden,),
            "qkv_bias": (shape.qkv_size,),
            "q_norm": (shape.head_dim,),
            "k_norm": (shape.head_dim,),
        }
        wanted += [(f"{name} of layer {index}", getattr(layer, name), size, bf16) for name, size in sizes.items()]
        for name, caches in (("out_keys", call.cache.keys), ("out_values", call.cache.values)):
            slots = (call.cache.keys[0].shape[0], shape.kv_heads, shape.head_dim)
            wanted.append((f"{name}[{index}]", caches[index], slots, torch.float8_e4m3fn if shape.kv_fp8 else bf16))
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
