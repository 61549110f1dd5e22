"""What a slot is compared with on the same inputs: plain torch, SGLang's functions, FlashInfer and sgl_kernel.

A peer that cannot run is still listed, with the reason. Plain torch is the embedded engine's own stage; SGLang's
functions come from ``engine.peers``, the others are here. Used by ``runner`` and by ``sgl-mega bench --list``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.engine.peers import Arguments, Call, Outputs, Peer, PeerUnavailableError, engine_peers


def peers_of(seam: str) -> tuple[Peer, ...]:
    """Every peer of a seam, runnable here or not."""
    return (_eager(seam), *engine_peers(seam), *_LIBRARIES.get(seam, ()))


def _eager(seam: str) -> Peer:
    def stage() -> Any:
        return getattr(import_module("sgl_mega_plugin.embedded.stages"), seam, None)

    def missing() -> str | None:
        return None if stage() is not None else f"the embedded engine has no stage {seam!r}"

    def prepare(arguments: Arguments) -> Call:
        run = stage()
        return lambda: run(**arguments)

    summary = "plain torch, one operator at a time: the embedded engine's stage"
    return Peer("eager", summary, prepare, missing)


def _not_installed(module: str, distribution: str) -> Callable[[], str | None]:
    return lambda: None if find_spec(module) is not None else f"{distribution} is not installed"


def _probabilities(logits: Tensor, temperatures: Tensor, rows: int) -> Tensor:
    """Softmax [B, rows, V] fp32 of rows of logits at their request's temperature."""
    batch = temperatures.shape[0]
    return torch.softmax(logits.view(batch, rows, -1).float() / temperatures.view(batch, 1, 1), dim=-1)


def _both_probabilities(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Draft [B, G, V] and target [B, T, V]; a draft without logits is one-hot."""
    rows = arguments["candidates"].shape[1]
    target = _probabilities(arguments["target_logits"], arguments["target_temperatures"], rows)
    if arguments["draft_logits"] is not None:
        return _probabilities(arguments["draft_logits"], arguments["draft_temperatures"], rows - 1), target
    drafts = arguments["candidates"][:, 1:].unsqueeze(-1)
    return torch.zeros_like(target[:, :-1]).scatter_(-1, drafts, 1.0), target


def _flashinfer(*, from_logits: bool) -> Callable[[Arguments], Call]:
    def prepare(arguments: Arguments) -> Call:
        sampling = import_module("flashinfer.sampling")
        drafts = arguments["candidates"][:, 1:].int().contiguous()
        ready = None if from_logits else _both_probabilities(arguments)

        def call() -> Outputs:
            draft, target = ready or _both_probabilities(arguments)
            sampling.chain_speculative_sampling(draft, drafts, target, seed=7, offset=0)
            return {}

        return call

    return prepare


def _renormed(arguments: Arguments) -> Call:
    """Softmax, then FlashInfer's filters of probabilities, each where a row asks for it."""
    sampling = import_module("flashinfer.sampling")
    if bool((arguments["min_ps"] > 0).any()):
        raise PeerUnavailableError("FlashInfer has no filter of probabilities by min_p")
    batch, (rows, vocab) = len(arguments["verify_lens"]), arguments["target_logits"].shape
    top_ks, top_ps = (arguments[name].repeat_interleave(rows // batch) for name in ("top_ks", "top_ps"))
    by_k, by_p = bool((top_ks < vocab).any()), bool((top_ps < 1).any())

    def call() -> Outputs:
        found = _probabilities(arguments["target_logits"], arguments["temperatures"], rows // batch).view(rows, vocab)
        found = sampling.top_k_renorm_probs(found, top_ks) if by_k else found
        if by_p:
            sampling.top_p_renorm_probs(found, top_ps)
        return {}

    return call


class _Chain:
    """A block as the tree that sgl_kernel's verify operators take, and the buffers that they write."""

    def __init__(self, candidates: Tensor) -> None:
        batch, rows = candidates.shape
        device = candidates.device
        self.index = torch.arange(batch * rows, device=device).view(batch, rows)
        following = torch.arange(1, rows + 1, device=device)
        following[-1] = -1
        self.next_token = following.repeat(batch, 1)
        self.next_sibling = torch.full_like(self.index, -1)
        self.predicts = torch.empty(batch * rows, dtype=torch.int32, device=device)
        self.accept_index = torch.empty(batch, rows, dtype=torch.int32, device=device)
        self.accepted = torch.empty(batch, dtype=torch.int32, device=device)
        self.arguments = (
            self.predicts,
            self.accept_index,
            self.accepted,
            candidates,
            self.index,
            self.next_token,
            self.next_sibling,
        )


def _verify_operator(name: str, module: str) -> Callable[..., None]:
    """An operator of sgl_kernel, which SGLang compiles when it is first used where the wheel has none for CUDA."""
    found = getattr(import_module("sgl_kernel"), name, None)
    if found is None:
        found = getattr(import_module(f"sglang.kernels.ops.speculative.{module}"), name)
    operator: Callable[..., None] = found
    return operator


def _tree_greedy(arguments: Arguments) -> Call:
    verify = _verify_operator("verify_tree_greedy", "tree")
    chain = _Chain(arguments["candidates"])
    shape = arguments["candidates"].shape

    def call() -> Outputs:
        tokens = arguments["target_tokens"]
        verify(*chain.arguments, arguments["target_logits"].argmax(-1).view(shape) if tokens is None else tokens)
        return {"out_correct_lens": chain.accepted}

    return call


def _tree_sampling(arguments: Arguments) -> Call:
    verify = _verify_operator("tree_speculative_sampling_target_only", "sampling")
    candidates = arguments["candidates"]
    chain = _Chain(candidates)
    coins = torch.rand(candidates.shape, device=candidates.device)
    last_coins = torch.rand(candidates.shape[0], device=candidates.device)

    def call() -> Outputs:
        target = _probabilities(
            arguments["target_logits"], arguments["target_temperatures"], candidates.shape[1]
        ).contiguous()
        verify(*chain.arguments, coins, last_coins, target, torch.zeros_like(target), 1.0, 1.0, True)
        return {}

    return call


_NEEDS_FLASHINFER = _not_installed("flashinfer", "flashinfer-python")
_NEEDS_SGL_KERNEL = _not_installed("sgl_kernel", "sglang-kernel")

_LIBRARIES: dict[str, tuple[Peer, ...]] = {
    "sampling_cutoffs": (
        Peer("flashinfer", "softmax, top_k_renorm_probs, top_p_renorm_probs", _renormed, _NEEDS_FLASHINFER),
    ),
    "greedy_accept": (
        Peer("sgl_kernel", "argmax, then verify_tree_greedy on a chain", _tree_greedy, _NEEDS_SGL_KERNEL),
    ),
    "sampled_accept": (
        Peer(
            "flashinfer",
            "softmax of both, then chain_speculative_sampling",
            _flashinfer(from_logits=True),
            _NEEDS_FLASHINFER,
        ),
        Peer(
            "flashinfer-probs",
            "chain_speculative_sampling alone, given the probabilities",
            _flashinfer(from_logits=False),
            _NEEDS_FLASHINFER,
        ),
        Peer(
            "sgl_kernel",
            "softmax of the target, then tree_speculative_sampling_target_only on a chain: another law of the draft",
            _tree_sampling,
            _NEEDS_SGL_KERNEL,
        ),
    ),
}
