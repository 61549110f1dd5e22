"""What the kit knows of a seam: how to draw its arguments, their sizes, and the ranges of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sgl_mega_plugin.conformance.seam_kits.draw import Draw, Drawn

Arguments = Mapping[str, Any]
#: Output, least and greatest value allowed.
Range = tuple[str, int, int]


def no_ranges(arguments: Arguments) -> tuple[Range, ...]:
    """For a seam whose outputs are neither ids nor lengths."""
    return ()


@dataclass(frozen=True)
class SeamKit:
    """One seam as the kit handles it.

    ``draw`` makes random arguments and names the outputs that keep their contents. ``sizes`` reads B, G and V off
    arguments; V is 1 where the seam does not show it. ``ranges`` says what every id and length has to be, whatever the
    inputs hold. ``sampled_logits`` are the logits of rows that draw tokens, each with the temperatures that say which
    rows those are.
    """

    seam: str
    draw: Callable[[Draw], Drawn]
    sizes: Callable[[Arguments], tuple[int, int, int]]
    ranges: Callable[[Arguments], tuple[Range, ...]] = no_ranges
    sampled_logits: Mapping[str, str] = field(default_factory=dict)
    alignment: int = 1  # bytes that every tensor's address has to be a multiple of, beyond its dtype's
