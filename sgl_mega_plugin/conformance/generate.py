"""Generated cases: for a seam, a seed and a number, always the same random arguments.

Sizes, dtypes, strides, padding rows, dead rows, ties, ids out of range and lengths at their ends are drawn at random.
The id of a case holds what was drawn. Called by the runner; ``seam_kits`` says how for each seam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.conformance.arguments import Arguments, copy_of, tensors
from sgl_mega_plugin.conformance.seam_kits import SEAM_KITS
from sgl_mega_plugin.conformance.seam_kits.draw import Draw
from sgl_mega_plugin.contract import Case, Requirements

_ATTEMPTS = 100
_NUDGES = 4
_NUDGE = 2.0**-8  # far above what another order of a sum or another logarithm moves a score by

Reference = Callable[..., None]


def generated_cases(
    seam: str, *, count: int, seed: int, requires: Requirements, reference: Reference, on_cuda: bool
) -> Iterator[Case]:
    """Cases 0 to ``count - 1`` of a seam. Each depends on the seed and its own number alone, not on the count."""
    for index in range(count):
        draw, values, keep = _settled(seam, f"{seed} {seam} {index}", requires, reference, on_cuda)
        facts = ", ".join(f"{name} {value}" for name, value in draw.facts.items())
        yield Case(
            f"generated-{index} (seed {seed}: {facts})",
            partial(copy_of, values),
            keep=keep,
            exact=bool(SEAM_KITS[seam].sampled_logits),  # multiples of 1/8, whose sums are exact in any order
        )


def _settled(
    seam: str, name: str, requires: Requirements, reference: Reference, on_cuda: bool
) -> tuple[Draw, dict[str, Any], frozenset[str]]:
    """The first arguments of a name on which no choice of the reference hangs on rounding."""
    for attempt in range(_ATTEMPTS):
        draw = Draw(f"{name} {attempt}", requires=requires, large=on_cuda)
        kit = SEAM_KITS[seam]
        values, keep = kit.draw(draw)
        if not kit.sampled_logits or _is_settled(reference, values, kit.sampled_logits, draw):
            return draw, values, keep
    raise RuntimeError(
        f"seam {seam!r}: in {_ATTEMPTS} draws the reference chose other ids for logits moved by {_NUDGE}: "
        f"the same noise has to give the same choice"
    )


def _is_settled(reference: Reference, values: Arguments, logits: Mapping[str, str], draw: Draw) -> bool:
    """Whether the reference chooses the same ids when the logits of sampled rows move a little."""
    first = _choices(reference, values)
    for _ in range(_NUDGES):
        moved = copy_of(values)
        for name, temperatures in logits.items():
            if moved[name] is None:
                continue
            scale = _NUDGE * (moved[temperatures] > 0)
            noise = 2 * torch.rand(moved[name].shape, generator=draw.numbers) - 1
            rows = scale.repeat_interleave(noise[..., 0].numel() // len(scale)).view(*noise.shape[:-1], 1)
            moved[name] = moved[name].float() + rows * noise
        if "out_step_logits" in moved:
            moved["out_step_logits"] = None
        if not all(map(torch.equal, first, _choices(reference, moved))):
            return False
    return True


def _choices(reference: Reference, values: Arguments) -> list[Tensor]:
    """The reference's integer outputs; none where it fails, which the case itself will show."""
    found = copy_of(values)
    try:
        reference(**found)
    except Exception:
        return []
    return [tensor for _, tensor in tensors(found, outputs=True) if not tensor.is_floating_point()]
