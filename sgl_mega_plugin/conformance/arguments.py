"""A seam's arguments as the kit handles them: equal copies, poisoned outputs, untouched memory.

A copy keeps every tensor's strides and what lies between them, and tensors that share memory still
share it. So a write beside an output is seen as well as a write into an input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Arguments = Mapping[str, Any]

#: No id, length, position or slot of a real step.
IMPOSSIBLE = 0x7FFFFFFF
_NO_BOOL = 0x7F  # neither of the bytes that a bool has
#: The integer dtype that holds a float of so many bytes.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors(arguments: Arguments, *, outputs: bool | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by label; ``outputs`` keeps only ``out_*`` arguments, or only the others."""
    for name, value in arguments.items():
        if outputs is not None and name.startswith("out_") is not outputs:
            continue
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for index, item in enumerate(value):
                if isinstance(item, Tensor):
                    yield f"{name}[{index}]", item


def raw(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def copy_of(arguments: Arguments, device: str | None = None) -> dict[str, Any]:
    """Equal arguments in memory of their own, on their device or another."""
    storages: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = value.untyped_storage().data_ptr()
            if key not in storages:
                storages[key] = raw(value).to(device or value.device, copy=True)
            target = torch.empty(0, dtype=value.dtype, device=storages[key].device)
            return target.set_(storages[key].untyped_storage(), value.storage_offset(), value.size(), value.stride())
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [copy(item) for item in value]
        return value

    return {name: copy(value) for name, value in arguments.items()}


def relocated(arguments: Arguments, alignment: int = 1) -> dict[str, Any]:
    """Equal arguments elsewhere: each starts one element into a larger allocation, in bytes that are all ones.

    A read beyond an input then finds NaN or -1, and a pointer is aligned to its dtype, or to ``alignment`` bytes, and
    no more.
    """
    elements: dict[int, int] = {}
    for _, tensor in tensors(arguments):
        key = tensor.untyped_storage().data_ptr()
        elements[key] = max(elements.get(key, alignment), tensor.element_size())
    storages: dict[int, Tensor] = {}

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = value.untyped_storage().data_ptr()
            lead = elements[key]
            if key not in storages:
                old = raw(value)
                storages[key] = torch.full((old.numel() + 17 * lead,), 0xFF, dtype=torch.uint8, device=old.device)
                storages[key][lead : lead + old.numel()] = old
            target = torch.empty(0, dtype=value.dtype, device=value.device)
            offset = value.storage_offset() + lead // value.element_size()
            return target.set_(storages[key].untyped_storage(), offset, value.size(), value.stride())
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [move(item) for item in value]
        return value

    return {name: move(value) for name, value in arguments.items()}


def near_tie(arguments: Arguments) -> dict[str, Any]:
    """A copy in which each greedy row of ``target_logits`` has another winner, by one unit in the last place.

    What two ranks see whose sums round differently. A seam without target logits gets an equal copy.
    """
    changed = copy_of(arguments)
    logits, temperatures = changed.get("target_logits"), changed.get("target_temperatures")
    if logits is None:
        return changed
    rows = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    if temperatures is not None:
        rows = (temperatures == 0).repeat_interleave(len(logits) // len(temperatures))
    turn_winners(logits, rows)
    return changed


def turn_winners(logits: Tensor, rows: Tensor) -> None:
    """Put the id after a row's winner just above it, in place, for the ``rows`` [N] of logits [N, V] that have one."""
    best, winner = torch.where(logits.isnan(), -torch.inf, logits).max(-1)
    other = (winner[:, None] + 1) % logits.shape[-1]
    turned = torch.where((rows & best.isfinite())[:, None], _next_above(best)[:, None], logits.gather(1, other))
    logits.scatter_(1, other, turned)


def _next_above(values: Tensor) -> Tensor:
    """The next greater number of each finite value; torch's own nextafter has no fp16 on every device."""
    bits = values.view(BITS[values.element_size()])
    moved = torch.where(values > 0, bits + 1, torch.where(values < 0, bits - 1, 1))
    return moved.to(bits.dtype).view(values.dtype)


def load(target: Arguments, source: Arguments) -> None:
    """Overwrite a copy's memory with another copy's, addresses unchanged."""
    for (_, to), (_, what) in zip(tensors(target), tensors(source), strict=True):
        raw(to).copy_(raw(what))


def blank(arguments: Arguments) -> dict[str, Any]:
    """A copy whose every tensor holds zeros: a step of padding rows at the same sizes."""
    zeros = copy_of(arguments)
    for _, tensor in tensors(zeros):
        raw(tensor).zero_()
    return zeros


def poison(arguments: Arguments, keep: frozenset[str]) -> None:
    """Fill every output but those in ``keep`` with what no slot may leave there.

    What is an input as well, an output that lies in an input's memory, keeps what it holds.
    """
    filled = [tensor for label, tensor in tensors(arguments, outputs=True) if label.partition("[")[0] not in keep]
    storages = {tensor.untyped_storage().data_ptr() for tensor in filled}
    inputs = [tensor for _, tensor in tensors(arguments, outputs=False)]
    shared = [(tensor, tensor.clone()) for tensor in inputs if tensor.untyped_storage().data_ptr() in storages]
    for tensor in filled:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.view(torch.uint8).fill_(_NO_BOOL)
        else:
            tensor.fill_(min(IMPOSSIBLE, torch.iinfo(tensor.dtype).max))
    for tensor, held in shared:
        tensor.copy_(held)


def trespasses(after: Arguments, before: Arguments) -> list[str]:
    """Where a run wrote although it is no element of an output: one line for each piece of memory."""
    owned: dict[int, Tensor] = {}  # by address of the storage: the bytes that outputs cover
    for _, tensor in tensors(after, outputs=True):
        key, size = tensor.untyped_storage().data_ptr(), tensor.element_size()
        elements = torch.zeros(tensor.untyped_storage().nbytes() // size, dtype=torch.bool, device=tensor.device)
        elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).fill_(True)
        covered = elements.repeat_interleave(size)
        owned[key] = owned[key] | covered if key in owned else covered

    found, seen = [], set()
    for (label, now), (_, then) in zip(tensors(after), tensors(before), strict=True):
        key = now.untyped_storage().data_ptr()
        if key in seen:
            continue
        seen.add(key)
        changed = raw(now) != raw(then)
        if key in owned:
            changed &= ~owned[key]
        if bool(changed.any()):
            what = "memory around" if label.startswith("out_") else "input"
            found.append(f"{what} {label!r} was written: {_first_change(now, then, changed)}")
    return found


def _first_change(now: Tensor, then: Tensor, changed: Tensor) -> str:
    size = now.element_size()
    element = int(changed.nonzero()[0]) // size
    values = [raw(t)[element * size : (element + 1) * size].clone().view(t.dtype).item() for t in (then, now)]
    return f"element {element} of its storage was {values[0]}, is {values[1]} ({int(changed.sum())} bytes changed)"
