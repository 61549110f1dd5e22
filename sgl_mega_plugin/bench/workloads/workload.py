"""What a workload is: how a seam's arguments are made at a size, and the bytes that a call cannot avoid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.bench.records import Cost, Settings, Size

Arguments = Mapping[str, Any]

_SEED = 20_260


@dataclass(frozen=True)
class Source:
    """Random numbers on a device, and whether they repeat: a set has its own seed."""

    device: str
    generator: torch.Generator

    @classmethod
    def seeded(cls, device: str, seed: int) -> Source:
        return cls(device, torch.Generator(device).manual_seed(seed))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def distinct(self, count: int, limit: int) -> Tensor:
        """``count`` different int64 in [0, limit)."""
        return torch.randperm(limit, generator=self.generator, device=self.device)[:count]

    def empty(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Workload:
    """How a seam's arguments are made and counted.

    ``shared(size, source)`` makes what every input set of a size has in common, ``make(size, source, shared)``
    the seam's arguments. ``cost(arguments)`` counts bytes. ``before(arguments)`` returns what has to run before each
    call, and is timed with it: where a call uses its inputs up.
    """

    seam: str
    shared: Callable[[Size, Source], dict[str, Any]]
    make: Callable[[Size, Source, dict[str, Any]], dict[str, Any]]
    cost: Callable[[Arguments], Cost]
    variants: tuple[str, ...] = ("",)
    shows_vocab: bool = True  # and the dtype of the logits
    before: Callable[[Arguments], Callable[[], object]] | None = None

    def sizes(self, settings: Settings) -> list[Size]:
        """Every size of a run, the batch sizes of one curve together."""
        if self.shows_vocab:
            curves = product(self.variants, settings.vocabs, settings.dtypes)
            return [
                Size(seam=self.seam, variant=variant, batch=batch, vocab=vocab, dtype=dtype)
                for variant, vocab, dtype in curves
                for batch in settings.batches
            ]
        return [Size(seam=self.seam, variant=v, batch=b) for v in self.variants for b in settings.batches]

    def ready(self, arguments: Arguments, call: Callable[[], Any]) -> Callable[[], Any]:
        """A call with what has to run before it."""
        if self.before is None:
            return call
        first = self.before(arguments)

        def both() -> Any:
            first()
            return call()

        return both

    def sets(self, size: Size, device: str, count: int) -> list[dict[str, Any]]:
        """``count`` sets of arguments with different contents."""
        shared = self.shared(size, Source.seeded(device, _SEED))
        return [self.make(size, Source.seeded(device, _SEED + 1 + index), shared) for index in range(count)]


def slot_vocab(size: Size) -> int:
    """V that a slot is set up with; a seam without a vocabulary has any."""
    return size.vocab or 1


def dtype_of(size: Size) -> torch.dtype:
    """The torch dtype of a size's logits."""
    found = getattr(torch, size.dtype or "")
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{size.dtype!r} is no dtype of torch")
    return found


def nothing_shared(size: Size, source: Source) -> dict[str, Any]:
    """For a seam whose input sets have nothing in common."""
    return {}


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def all_tensors(a: Arguments) -> Cost:
    """Every input once and every output once."""
    tensors = {name: value for name, value in a.items() if isinstance(value, Tensor)}
    written = nbytes(*(value for name, value in tensors.items() if name.startswith("out_")))
    return Cost(bytes_read=nbytes(*tensors.values()) - written, bytes_written=written)
