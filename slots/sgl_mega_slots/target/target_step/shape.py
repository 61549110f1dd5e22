"""What of a dense decoder `target_step` has to know, and which of them it covers. No torch here."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

#: Weight rows that one tensor-core tile holds.
GROUP = 8
#: Pairs of bytes of a weight row in one 128-byte line of shared memory: values in bf16, half as many as in fp8.
SLAB = 64
#: Rows and columns of a block of fp8 weights that share a scale.
SCALE_BLOCK = 128

MAX_ROWS = 32
HEAD_DIMS = (64, 128)


class WeightKind(enum.StrEnum):
    """What the four matrices of every layer are. fp8 is e4m3 with fp32 scales, one a row or one a block."""

    BF16 = "bf16"
    FP8_CHANNEL = "fp8-channel"
    FP8_BLOCK = "fp8-block"

    @property
    def slab(self) -> int:
        """Values of a weight row in one line of shared memory."""
        return SLAB if self is WeightKind.BF16 else 2 * SLAB

    def scales_of(self, rows: int, columns: int) -> tuple[int, ...] | None:
        """The shape of the scales of a matrix; None where it has none."""
        if self is WeightKind.BF16:
            return None
        return (rows,) if self is WeightKind.FP8_CHANNEL else (-(-rows // SCALE_BLOCK), columns // SCALE_BLOCK)


@dataclass(frozen=True)
class DenseShape:
    """A dense decoder in the style of Llama, Qwen2 and Qwen3. Sizes are of one rank."""

    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    qk_norm: bool = False
    qkv_bias: bool = False
    weights: WeightKind = WeightKind.BF16
    kv_fp8: bool = False  # the KV cache is e4m3 without scales; else bf16

    @property
    def q_size(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of a layer's four matrices, in their order."""
        return (
            (self.qkv_size, self.hidden),
            (self.hidden, self.q_size),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        )

    def weight_bytes(self, *, head: bool) -> int:
        """Bytes of weights and their scales that a step reads once, the embedding's few rows left out."""
        value = 2 if self.weights is WeightKind.BF16 else 1
        layer = sum(value * rows * columns for rows, columns in self.matrices)
        layer += sum(4 * math.prod(self.weights.scales_of(*size) or (0,)) for size in self.matrices)
        return self.layers * layer + (2 * self.vocab * self.hidden if head else 0)

    def reasons(self) -> list[str]:
        """Why the kernel does not cover this decoder; empty when it does."""
        reasons = [
            f"{name} {value} is no multiple of {SLAB}"
            for name, value in (("hidden size", self.hidden), ("intermediate size", self.intermediate))
            if value % SLAB or value <= 0
        ]
        if self.weights is not WeightKind.BF16:
            inputs = {"hidden": self.hidden, "query": self.q_size, "intermediate": self.intermediate}
            reasons += [
                f"{name} size {value} is no multiple of {self.weights.slab}, which fp8 weights need"
                for name, value in inputs.items()
                if value % self.weights.slab
            ]
        if self.head_dim not in HEAD_DIMS:
            reasons.append(f"head size {self.head_dim} is not one of {list(HEAD_DIMS)}")
        if self.q_heads % self.kv_heads:
            reasons.append(f"{self.q_heads} query heads do not share {self.kv_heads} KV heads evenly")
        if self.vocab % GROUP:
            reasons.append(f"vocabulary {self.vocab} is no multiple of {GROUP}")
        if self.layers < 1:
            reasons.append("there is no layer")
        return reasons
