"""Launch of `draft_step`: the kernel of `target_step`, for plans whose rows see all of their request's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sgl_mega_plugin.contract import SlotSetup
from sgl_mega_slots.target.target_step.launch import OneLaunch
from sgl_mega_slots.target.target_step.weights import call_of


class DraftStep(OneLaunch):
    """`draft_forward` as one launch. The first call with a model or a number of requests builds and binds; after it,
    calls of the same kind are capturable. A request has G rows, or G + 1 where the anchor's row drafts nothing.
    """

    def __init__(self, setup: SlotSetup) -> None:
        super().__init__(setup, name="draft_step", tokens=(setup.gamma, setup.gamma + 1), causal=False)

    def __call__(
        self,
        *,
        input_ids: Tensor,
        positions: Tensor,
        cache_locs: Tensor,
        seq_lens: Tensor,
        req_pool_indices: Tensor,
        req_to_token: Tensor,
        embedding: Tensor,
        input_norms: Sequence[Tensor],
        qkv_weights: Sequence[Tensor],
        qkv_scales: Sequence[Tensor] | None,
        qkv_biases: Sequence[Tensor] | None,
        q_norms: Sequence[Tensor] | None,
        k_norms: Sequence[Tensor] | None,
        output_weights: Sequence[Tensor],
        output_scales: Sequence[Tensor] | None,
        mlp_norms: Sequence[Tensor],
        gate_up_weights: Sequence[Tensor],
        gate_up_scales: Sequence[Tensor] | None,
        down_weights: Sequence[Tensor],
        down_scales: Sequence[Tensor] | None,
        final_norm: Tensor,
        cos_sin: Tensor,
        eps: float,
        out_keys: Sequence[Tensor],
        out_values: Sequence[Tensor],
        out_hidden: Tensor,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.DraftForward`.

        Raises:
            ValueError: an argument is not the seam's.
            Exception: as :meth:`OneLaunch.run`.
        """
        self.run(call_of(dict(locals())))
