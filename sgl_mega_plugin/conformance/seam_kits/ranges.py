"""What every id and length has to be, whatever the inputs hold: true of a reference as of a kernel. Called by the
runner."""

from __future__ import annotations

from torch import Tensor

from sgl_mega_plugin.conformance.seam_kits import SEAM_KITS
from sgl_mega_plugin.conformance.seam_kits.kit import Arguments


def range_problems(seam: str, arguments: Arguments) -> list[str]:
    """One line for each output with a value out of range: its first such element."""
    lines = []
    for name, low, high in SEAM_KITS[seam].ranges(arguments):
        values: Tensor = arguments[name]
        wrong = (values < low) | (values > high)
        if bool(wrong.any()):
            index = tuple(int(i) for i in wrong.nonzero()[0])
            lines.append(f"{name}{list(index)}: found {values[index].item()}, allowed {low} to {high}")
    return lines
