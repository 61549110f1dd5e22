"""Cases of `scan_accept`. The kit's generated cases bring the usual oddities; these hold what must be in every run."""

from collections.abc import Iterator
from typing import Any

import torch

from sgl_mega_plugin.contract import Case


def arguments(device: str, logits: torch.Tensor, candidates: list[list[int]], lens: list[int]) -> dict[str, Any]:
    """The seam's arguments: logits [B * T, V], candidates [B, T], verify lengths [B]."""
    batch, rows = len(candidates), len(candidates[0])

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return {
        "candidates": torch.tensor(candidates, device=device),
        "target_logits": logits.to(device),
        "target_tokens": None,
        "seq_lens": torch.arange(batch, device=device) * 7 + 5,
        "verify_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "simulated_correct": None,
        "out_correct_lens": zeros(batch, dtype=torch.int32),
        "out_bonus_tokens": zeros(batch),
        "out_commit_lens": zeros(batch, dtype=torch.int32),
        "out_new_seq_lens": zeros(batch),
        "out_tokens": zeros(batch, rows),
    }


def _rows(vocab: int, winners: list[int]) -> torch.Tensor:
    logits = torch.zeros(len(winners), vocab)
    logits[torch.arange(len(winners)), winners] = 1.0
    return logits


def _simulated(device: str) -> dict[str, Any]:
    """The argmax given instead of the logits, and two drafts accepted whatever they are."""
    values = arguments(device, torch.zeros(6, 9), [[0, 4, 7], [3, 8, 1]], [3, 2])
    tokens = torch.tensor([[5, 7, 1], [8, 2, 0]], device=device)
    simulated = torch.tensor([2], dtype=torch.int32, device=device)
    return values | {"target_logits": None, "target_tokens": tokens, "simulated_correct": simulated}


def cases() -> Iterator[Case]:
    yield Case("all_stand", lambda device: arguments(device, _rows(9, [4, 7, 8]), [[0, 4, 7]], [3]))
    yield Case("second_falls", lambda device: arguments(device, _rows(9, [4, 7, 8]), [[0, 4, 6]], [3]))
    yield Case("a_padded_row", lambda device: arguments(device, _rows(9, [4, 7, 8, 1]), [[0, 4], [3, 8]], [2, 0]))
    yield Case("simulated_from_tokens", _simulated)
    yield Case("two_tiles", lambda device: arguments(device, _rows(5000, [4999, 4097]), [[0, 4999]], [2]))
