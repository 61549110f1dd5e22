"""`sampling_cutoffs` in plain torch and fp64: the definition that the kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 1e30


def sampling_cutoffs(
    *,
    target_logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    verify_lens: Tensor,
    out_cutoffs: Tensor,
) -> None:
    """See :class:`sgl_mega_plugin.contract.SamplingCutoffs`."""
    batch, vocab = len(verify_lens), target_logits.shape[-1]
    rows = len(target_logits) // batch
    live = torch.arange(rows, device=target_logits.device) < verify_lens[:, None]
    asks = (top_ks > 0) & (top_ks < vocab) | (top_ps < 1) | (min_ps > 0)
    wanted = (live & (asks & (temperatures > 0))[:, None]).flatten()
    each = torch.arange(batch, device=target_logits.device).repeat_interleave(rows)
    found = smallest_kept(target_logits, temperatures[each], top_ks[each], top_ps[each], min_ps[each])
    out_cutoffs.copy_(torch.where(wanted, found, -torch.inf))


def ladder(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [N, V] fp32 in descending order, and for each, fp64 mass, number and mass of the greater ones."""
    values = torch.where(logits.isnan(), -torch.inf, logits.float()).clamp(max=_LARGEST) + 0.0
    values = values.sort(dim=-1, descending=True).values
    top = values[:, :1]
    scale = torch.where(temperatures > 0, temperatures, 1.0).double()[:, None]
    mass = torch.where(values > -torch.inf, ((values.double() - top.double()) / scale).exp(), 0)
    place = torch.arange(values.shape[-1], device=values.device).expand_as(values)
    first = torch.cat([torch.ones_like(top, dtype=torch.bool), values[:, 1:] != values[:, :-1]], dim=-1)
    greater = torch.where(first, place, 0).cummax(dim=-1).values
    return values, mass, greater, (mass.cumsum(dim=-1) - mass).gather(-1, greater)


def smallest_kept(logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """The smallest logit that stays [N] fp32, for rows [N, V] with parameters of their own."""
    values, mass, greater, mass_above = ladder(logits, temperatures)
    k, p, m = (parameter[:, None] for parameter in (top_ks, top_ps, min_ps))
    top = greater == 0
    kept = (greater < k) | (k <= 0) | (k >= values.shape[-1])
    whole = torch.where(kept, mass, 0).sum(dim=-1, keepdim=True)
    kept &= ~(p < 1) | top | (mass_above < p.double() * whole)
    kept &= ~(m > 0) | top | (mass >= m.double())
    return torch.where(kept, values, torch.inf).amin(dim=-1)
