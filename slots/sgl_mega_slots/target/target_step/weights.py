"""The tensors of a dense decoder as `target_step` takes them: the model's own, never a copy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are ``[outputs, inputs]``, rows contiguous; all bf16."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [q size + 2 KV sizes, hidden]
    o: Tensor  # [hidden, q size]
    middle_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden], all gates first
    down: Tensor  # [hidden, intermediate]
    qkv_bias: Tensor | None = None  # [q size + 2 KV sizes]
    q_norm: Tensor | None = None  # [head dim]
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """A decoder. ``rotary`` holds a row a position: cosines of the half head, then sines, fp32."""

    embedding: Tensor  # [vocab, hidden] bf16
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding where the two are tied
    rotary: Tensor  # [positions, head dim] fp32


@dataclass(frozen=True)
class Cache:
    """Keys and values of every layer, ``[places, KV heads, head dim]`` bf16."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class StepInputs:
    """What a step reads of its requests. Row ``b * T + t`` is token t of request b."""

    input_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    out_cache_loc: Tensor  # [rows] int64, places of this step's keys and values
    prefix_lengths: Tensor  # [requests] int64, this step's tokens left out
    request_rows: Tensor  # [requests] int64, each request's row of the token table
    token_table: Tensor  # [*, positions] int32, places in the cache by position, last axis contiguous
