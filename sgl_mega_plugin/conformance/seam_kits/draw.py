"""Random choices of generated arguments, and what was chosen, in words. Used by the kit of every stage."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT, Requirements

Drawn = tuple[dict[str, Any], frozenset[str]]

INF, NAN = float("inf"), float("nan")
FAR = (-1, 0x7FFFFFFF, 1 << 45, -(1 << 40))  # ids and locations that are none
NOTHING_KEPT: frozenset[str] = frozenset()
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_VOCABS = (1, 2, 3, 7, 31, 64, 97)
_LARGE_VOCABS = (1_000, 4_097)


class Draw:
    """Random choices from one name, and what was chosen, in words."""

    def __init__(self, name: str, *, requires: Requirements, large: bool) -> None:
        self.random = random.Random(name)
        self.numbers = torch.Generator().manual_seed(self.random.getrandbits(62))
        self.facts: dict[str, object] = {}
        self._large = large
        self._most = min(17 if large else 5, requires.max_batch or 17)
        self._dtypes = sorted(requires.dtypes & _FLOATS.keys()) or sorted(_FLOATS)
        self._strided = self.chance(0.5)
        self._gap = self.random.randint(1, 5)  # one for all: an engine's buffers of one kind share their strides
        self.facts["layout"] = f"strided by {self._gap}" if self._strided else "contiguous"

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def fact(self, name: str, value: Any) -> Any:
        """Note a choice under its letter or argument, and return it."""
        self.facts[name] = value
        return value

    def size(self, name: str, low: int, high: int) -> int:
        return int(self.fact(name, self.random.randint(low, high)))

    def batch(self) -> int:
        return self.size("B", 1, self._most)

    def vocab(self) -> int:
        return int(self.fact("V", self.random.choice(_VOCABS + (_LARGE_VOCABS if self._large else ()))))

    def dtype(self, name: str) -> torch.dtype:
        return _FLOATS[self.fact(name, self.random.choice(self._dtypes))]

    def index_dtype(self, name: str) -> torch.dtype:
        return torch.int32 if self.fact(name, self.random.choice(["int32", "int64"])) == "int32" else torch.int64

    def ints(self, count: int, low: int, high: int) -> list[int]:
        return [self.random.randint(low, high) for _ in range(count)]

    def lay(self, tensor: Tensor) -> Tensor:
        """The same values, in a strided case with gaps between the rows and a start that is not the memory's."""
        if not self._strided:
            return tensor.clone()
        shape = (*tensor.shape[:-1], tensor.shape[-1] + self._gap)
        view = torch.zeros(shape, dtype=tensor.dtype)[..., 1 : 1 + tensor.shape[-1]]
        view.copy_(tensor)
        return view

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return self.lay(torch.zeros(*shape, dtype=dtype))

    def eighths(self, *shape: int, reach: int) -> Tensor:
        """Multiples of 1/8 in [-reach, reach]: ties are common, and sums are exact in fp32 in any order."""
        return torch.randint(-8 * reach, 8 * reach + 1, shape, generator=self.numbers) / 8

    def logits(self, rows: int, vocab: int, dtype: torch.dtype, reach: int) -> Tensor:
        """[rows, V] eighths; one row in four has entries that are no number, or nothing else."""
        made = self.eighths(rows, vocab, reach=reach).to(dtype)
        odd = []
        for row in range(rows):
            if self.chance(0.25):
                value = self.random.choice([NAN, -INF, -INF, INF])
                count = vocab if self.chance(0.3) and value != INF else max(1, vocab // 3)
                made[row, torch.randperm(vocab, generator=self.numbers)[:count]] = value
                odd.append(row)
        self.facts["odd rows"] = odd
        return made

    def temperatures(self, name: str, batch: int) -> Tensor:
        return torch.tensor(self.fact(name, [self.random.choice([0.0, 0.3, 0.7, 1.0, 1.5]) for _ in range(batch)]))


def or_none(draw: Draw, values: Sequence[int]) -> list[int]:
    """The same locations or positions, some of them replaced by what is none."""
    return [draw.random.choice([PADDING_SLOT, *FAR]) if draw.chance(0.15) else value for value in values]
