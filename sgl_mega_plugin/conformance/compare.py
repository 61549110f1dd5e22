"""Comparison of an implementation's outputs with its reference's."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.conformance.arguments import BITS, Arguments, tensors


def differences(found: Arguments, expected: Arguments, bound: float) -> list[str]:
    """One line for each output that differs; ``bound`` is for floats, integers are exact."""
    lines = []
    for (label, value), (_, wanted) in zip(tensors(found, outputs=True), tensors(expected, outputs=True), strict=True):
        line = difference(label, value, wanted, bound)
        if line is not None:
            lines.append(line)
    return lines


def difference(label: str, found: Tensor, expected: Tensor, bound: float) -> str | None:
    """The first element that differs, with index, both values and the bound; None if all agree.

    With a bound, an error may be that part of the larger of the expected value and the root mean
    square of its row (last axis): a sum near zero has the rounding error of its terms. A float of 8 bits
    may be the next one to the expected: what lies about halfway between two is rounded either way.
    """
    bound = bound if expected.is_floating_point() else 0.0
    wrong = ~(_same_bits(found, expected) if bound == 0 else _close(found, expected, bound))
    if not bool(wrong.any()):
        return None
    index = tuple(int(i) for i in wrong.nonzero()[0])
    allowed = "bit for bit" if bound == 0 else f"relative bound {bound:g}"
    return (
        f"{label}{list(index)}: found {found[index].item()}, expected {expected[index].item()}, {allowed}; "
        f"{int(wrong.sum())} of {wrong.numel()} differ"
    )


def _both_nan(found: Tensor, expected: Tensor) -> Tensor:
    if expected.element_size() == 1:
        found, expected = found.float(), expected.float()  # floats of 8 bits have few operators on a GPU
    return found.isnan() & expected.isnan()


def _same_bits(found: Tensor, expected: Tensor) -> Tensor:
    if expected.dtype is torch.bool:
        return found.view(torch.uint8) == expected.view(torch.uint8)  # a byte left poisoned is neither
    if not expected.is_floating_point():
        return found == expected
    bits = BITS[expected.element_size()]
    return (found.contiguous().view(bits) == expected.contiguous().view(bits)) | _both_nan(found, expected)


def _close(found: Tensor, expected: Tensor, bound: float) -> Tensor:
    wanted = expected.double()
    finite = wanted.isfinite()
    squares = torch.where(finite, wanted, 0.0).square()
    rms = (squares.sum(-1, keepdim=True) / finite.sum(-1, keepdim=True).clamp(min=1)).sqrt()
    near = (found.double() - wanted).abs() <= bound * torch.maximum(wanted.abs(), rms)
    if expected.element_size() == 1:
        near |= (_order(found) - _order(expected)).abs() <= 1
        near &= found.float().isfinite()
    return (near & finite) | (found.double() == wanted) | _both_nan(found, expected)


def _order(values: Tensor) -> Tensor:
    """Numbers of floats of 8 bits in the order of their size, zeros alike."""
    bits = values.contiguous().view(torch.uint8).int()
    return torch.where(bits > 127, 128 - bits, bits)
