"""The sizes that the embedded target and draft both have."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from sgl_mega_plugin.contract import Record


class ModelShape(Record):
    """Sizes of a pre-norm transformer with grouped-query attention and rotary positions."""

    vocab_size: int = Field(ge=2)
    hidden: int = Field(ge=1)
    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    intermediate: int = Field(ge=1)
    rms_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    max_positions: int = Field(ge=1)

    @model_validator(mode="after")
    def _heads_group(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        return self
