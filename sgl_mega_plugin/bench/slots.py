"""A provided slot as a benchmark needs it: built for a size, and its gate. Used by ``runner`` and ``ahead``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgl_mega_plugin.bench.records import Gate, Size
from sgl_mega_plugin.bench.workloads import sizes, slot_vocab
from sgl_mega_plugin.contract import Backend, Provided, SlotSetup
from sgl_mega_plugin.registry import load_implementation


def build_slot(
    provided: Provided, size: Size, *, device: str, backend: Backend = Backend.KERNEL
) -> Callable[..., None]:
    """A slot's implementation for a size on a device. Raises what loading and building it raise."""
    setup = SlotSetup(
        backend=backend, device=device, max_batch=size.batch, gamma=sizes.GAMMA, vocab_size=slot_vocab(size)
    )
    built: Callable[..., None] = load_implementation(provided)(setup)
    return built


def gate_of(provided: Provided, *, run: int, total: int, failures: Sequence[str] = ()) -> Gate:
    """The gate of a slot of whose ``total`` cases ``run`` ran, with the texts of those that failed."""
    return Gate(
        slot=provided.slot.name,
        distribution=provided.distribution,
        version=provided.version,
        run=run,
        total=total,
        failures=tuple(failures),
    )
