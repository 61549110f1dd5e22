"""`relay` in plain torch: the definition that the kernel is compared with.

SGLang 0.5.23 scatters every row of a padded batch (``FutureMap.publish`` and ``stash``, and ``_scatter_future_relay``
in the verify graph) and relies on padding naming table row 0, which no request owns. Here a padding row writes nothing,
wherever it points.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relay(
    *,
    req_pool_indices: Tensor,
    verify_lens: Tensor,
    new_seq_lens: Tensor,
    bonus_tokens: Tensor,
    out_relay_lens: Tensor,
    out_relay_tokens: Tensor,
    out_next_seq_lens: Tensor | None,
    out_next_anchors: Tensor | None,
) -> None:
    """See :class:`sgl_mega_plugin.contract.Relay`."""
    row, live = req_pool_indices.long(), verify_lens > 0
    written = live & (row >= 0) & (row < len(out_relay_lens))
    out_relay_lens[row[written]] = new_seq_lens[written].long()
    out_relay_tokens[row[written]] = bonus_tokens[written]
    if out_next_seq_lens is not None:
        out_next_seq_lens.copy_(torch.where(live, new_seq_lens, 0))
    if out_next_anchors is not None:
        out_next_anchors.copy_(torch.where(live, bonus_tokens, 0))
