"""`params_once` in plain torch: the definition that the kernel is compared with.

SGLang 0.5.23 (``resolve_draft_params``) stages anew only for other tensors, so an edit in place is not seen, and a
graph's rows beyond the batch keep an older batch's values; here every launch settles both. Its requests reach it with
temperature 0 rewritten to temperature 1 and top_k 1, so its rows are greedy by top_k alone; here a temperature of 0
is greedy by itself, and so are a negative one and NaN, which SGLang clamps to 1e-5 (NaN stays) and passes on.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_TEMPERATURE = 1e-5


def step_params(
    *,
    temperatures: Tensor,
    top_ks: Tensor,
    verify_lens: Tensor | None,
    out_temperatures: Tensor,
    out_greedy: Tensor,
    out_step_temperatures: Tensor,
) -> None:
    """See :class:`sgl_mega_plugin.contract.StepParams`."""
    batch, given = len(out_temperatures), len(top_ks)
    temperature = torch.ones_like(out_temperatures)
    greedy = torch.ones_like(out_greedy)
    value = temperatures.reshape(given).float()
    smallest = torch.tensor(SMALLEST_TEMPERATURE, device=value.device)
    temperature[:given] = torch.where(value > smallest, value, smallest)
    greedy[:given] = (top_ks <= 1) | ~(value > 0)
    if verify_lens is not None:
        live = (verify_lens > 0) & (torch.arange(batch, device=verify_lens.device) < given)
        temperature = torch.where(live, temperature, 1.0)
        greedy = greedy | ~live
    out_temperatures.copy_(temperature)
    out_greedy.copy_(greedy)
    out_step_temperatures.copy_(torch.where(greedy, 0.0, temperature))
