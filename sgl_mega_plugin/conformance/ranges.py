"""What every id and length has to be, whatever the inputs hold: true of a reference as of a kernel. Called by the
runner."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sgl_mega_plugin.conformance.arguments import Arguments

#: Output, least and greatest value allowed.
Range = tuple[str, int, int]


def range_problems(seam: str, arguments: Arguments) -> list[str]:
    """One line for each output with a value out of range: its first such element."""
    lines = []
    for name, low, high in _RANGES.get(seam, _none)(arguments):
        values: Tensor = arguments[name]
        wrong = (values < low) | (values > high)
        if bool(wrong.any()):
            index = tuple(int(i) for i in wrong.nonzero()[0])
            lines.append(f"{name}{list(index)}: found {values[index].item()}, allowed {low} to {high}")
    return lines


def _none(arguments: Arguments) -> tuple[Range, ...]:
    return ()


def _draft_block(arguments: Arguments) -> tuple[Range, ...]:
    return (("out_draft_tokens", 0, arguments["base_logits"].shape[-1] - 1),)


def _accept(arguments: Arguments) -> tuple[Range, ...]:
    rows, vocab = arguments["candidates"].shape[1], arguments["target_logits"].shape[-1]
    return (
        ("out_correct_lens", 0, rows - 1),
        ("out_bonus_tokens", 0, vocab - 1),
        ("out_commit_lens", 0, rows),
        ("out_tokens", 0, vocab - 1),
    )


def _step_inputs(arguments: Arguments) -> tuple[Range, ...]:
    last = min(arguments["max_positions"], arguments["req_to_token"].shape[1]) - 1
    return (
        ("out_positions", 0, last),
        ("out_cache_locs", 0, max(0, int(arguments["req_to_token"].max()))),
    )


_RANGES: dict[str, Callable[[Arguments], tuple[Range, ...]]] = {
    "draft_block": _draft_block,
    "greedy_accept": _accept,
    "sampled_accept": _accept,
    "step_inputs": _step_inputs,
}
