"""What of a dense decoder `target_step` has to know, and which of them it covers. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

#: Weight rows that one tensor-core tile holds.
GROUP = 8
#: Values of a weight row in one 128-byte line of shared memory.
SLAB = 64

MAX_ROWS = 32
HEAD_DIMS = (64, 128)


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

    @property
    def q_size(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    def weight_bytes(self, *, head: bool) -> int:
        """Bytes of bf16 weights that a step reads once, the embedding's few rows left out."""
        layer = self.hidden * (self.qkv_size + self.q_size + 3 * self.intermediate)
        return 2 * (self.layers * layer + (self.vocab * self.hidden if head else 0))

    def reasons(self) -> list[str]:
        """Why the kernel does not cover this decoder; empty when it does."""
        reasons = [
            f"{name} {value} is no multiple of {SLAB}"
            for name, value in (("hidden size", self.hidden), ("intermediate size", self.intermediate))
            if value % SLAB or value <= 0
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
