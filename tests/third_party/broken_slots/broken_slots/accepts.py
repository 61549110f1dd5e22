"""Five faults on the seam `greedy_accept`."""

from typing import Any

from torch import Tensor

from sample_slots.launch import BLOCK_V, ScanAccept
from sgl_mega_plugin.contract import SlotSetup


class _Damaged(ScanAccept):
    """The sample's slot; a subclass breaks one thing before or after its launch."""

    def before(self, values: dict[str, Any]) -> None: ...

    def after(self, values: dict[str, Any]) -> None: ...

    def __call__(
        self,
        *,
        candidates: Tensor,
        target_logits: Tensor | None,
        target_tokens: Tensor | None,
        seq_lens: Tensor,
        verify_lens: Tensor,
        simulated_correct: Tensor | None,
        out_correct_lens: Tensor,
        out_bonus_tokens: Tensor,
        out_commit_lens: Tensor,
        out_new_seq_lens: Tensor,
        out_tokens: Tensor,
    ) -> None:
        values = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.before(values)
        super().__call__(**values)
        self.after(values)


class StaleReplay(_Damaged):
    """A copy made anew for every new address: right in eager calls, old when the same memory is filled again."""

    def __init__(self, setup: SlotSetup) -> None:
        super().__init__(setup)
        self._copied = 0
        self._lens: Tensor | None = None

    def before(self, values: dict[str, Any]) -> None:
        lens = values["verify_lens"]
        if self._lens is None or self._copied != lens.data_ptr():
            self._copied, self._lens = lens.data_ptr(), lens.clone()
        values["verify_lens"] = self._lens


class PaddedWrite(_Damaged):
    def after(self, values: dict[str, Any]) -> None:
        values["out_commit_lens"].clamp_(min=1)


class IdOutOfRange(_Damaged):
    def after(self, values: dict[str, Any]) -> None:
        values["out_bonus_tokens"].clamp_(min=BLOCK_V)


class HostRead(_Damaged):
    def before(self, values: dict[str, Any]) -> None:
        if not bool((values["verify_lens"] > 0).any()):
            values["out_tokens"].zero_()


class WrongSignature:
    def __init__(self, setup: SlotSetup) -> None: ...

    def __call__(self, *, drafts: Tensor, target_logits: Tensor) -> None: ...
