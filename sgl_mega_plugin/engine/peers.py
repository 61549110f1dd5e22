"""SGLang's own functions for the work of a seam, as the benchmark times them beside the slots.

Each peer gets a seam's arguments, brings them into SGLang's form before it is timed, and returns what it computed
under the seam's names where the two are comparable. Imports SGLang only inside functions; ``missing`` says why
a peer cannot run here. Where SGLang has a kernel and a chain of small ones behind a switch, both are peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sgl_mega_plugin.engine import version

Arguments = Mapping[str, Any]
#: Outputs under the seam's names; those of the first call are compared with the slot's.
Outputs = Mapping[str, Tensor]
#: A timed call; None says that it wrote the seam's own outputs.
Call = Callable[[], Outputs | None]


class PeerUnavailableError(RuntimeError):
    """Why a peer does not run on these inputs."""


def _nothing_missing() -> str | None:
    return None


@dataclass(frozen=True)
class Peer:
    """Another way to do the work of a seam.

    ``prepare(arguments)`` does what happens once, outside the timing, and returns the call; it raises
    :class:`PeerUnavailableError` for inputs that the peer does not take.
    """

    name: str
    summary: str
    prepare: Callable[[Arguments], Call]
    missing: Callable[[], str | None] = _nothing_missing


def engine_missing() -> str | None:
    """Why SGLang's functions cannot be called here, or None."""
    release = version.engine_version()
    if release is None:
        return "SGLang is not installed"
    return "; ".join(version.release_reasons(release)) or None


def engine_peers(seam: str) -> tuple[Peer, ...]:
    """SGLang's ways to do a seam's work; none for a seam that it has nothing for."""
    return tuple(Peer(name, summary, prepare, engine_missing) for name, summary, prepare in _PEERS.get(seam, ()))


def _accept_greedy(arguments: Arguments) -> Call:
    from sglang.kernels.ops.speculative.dspark.dspark_accept import AcceptGreedy

    def accept() -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = AcceptGreedy.execute(
            candidates=arguments["candidates"],
            target_logits=arguments["target_logits"],
            verify_num_draft_tokens=arguments["candidates"].shape[1],
        )
        return found

    return _finalized(arguments, accept, comparable=True)


def _finalized(arguments: Arguments, accept: Callable[[], tuple[Tensor, Tensor, Tensor]], *, comparable: bool) -> Call:
    """An accept with the lengths and tokens that SGLang computes behind each."""
    from sglang.kernels.ops.speculative.dspark.dspark_accept import FinalizeAcceptLens
    from sglang.kernels.ops.speculative.dspark.dspark_verify_window import BuildOutTokens

    drafts = arguments["candidates"][:, 1:].contiguous()
    gamma = drafts.shape[1]

    def call() -> Outputs:
        correct, bonus, trimmed = accept()
        lengths = FinalizeAcceptLens.execute(
            correct_len=correct, cap_trim_lens=trimmed, prefix_lens=arguments["seq_lens"]
        )
        BuildOutTokens.execute(
            draft_tokens=drafts, correct_len=correct, bonus=bonus, verify_num_draft_tokens=gamma + 1, gamma=gamma
        )
        if not comparable:
            return {}
        return {
            "out_correct_lens": correct,
            "out_bonus_tokens": bonus,
            "out_commit_lens": lengths.commit_lens,
            "out_new_seq_lens": lengths.new_seq_lens,
        }

    return call


def _accept_tail(arguments: Arguments) -> Call:
    from sglang.kernels.ops.speculative.dspark.dspark_accept import _row_argmax
    from sglang.kernels.ops.speculative.dspark.static_accept_tail import static_accept_tail

    batch, device = arguments["candidates"].shape[0], arguments["candidates"].device
    outputs = {
        name: torch.empty_like(arguments[name])
        for name in ("out_correct_lens", "out_bonus_tokens", "out_commit_lens", "out_new_seq_lens")
    }
    trimmed = torch.empty(batch, dtype=torch.int32, device=device)
    tokens = torch.empty_like(arguments["out_tokens"])
    gate = torch.ones(1, dtype=torch.int32, device=device)

    def call() -> Outputs:
        static_accept_tail(
            candidates=arguments["candidates"],
            target_predict=_row_argmax(arguments["target_logits"], fused=True).view(-1),
            seq_lens=arguments["seq_lens"],
            verify_lens=arguments["verify_lens"],
            gate=gate,
            correct_len_out=outputs["out_correct_lens"],
            bonus_out=outputs["out_bonus_tokens"],
            cap_trim_lens_out=trimmed,
            commit_lens_out=outputs["out_commit_lens"],
            new_seq_lens_out=outputs["out_new_seq_lens"],
            out_tokens_out=tokens,
        )
        return outputs

    return call


def _accept_sampling(arguments: Arguments) -> Call:
    """Softmax of target and draft, then the chain's rejection kernel."""
    from sglang.kernels.ops.speculative.dspark.dspark_accept import AcceptSampling, SoftmaxTemp

    candidates, draft_logits = arguments["candidates"], arguments["draft_logits"]
    batch, rows = candidates.shape
    vocab = arguments["target_logits"].shape[1]
    drafts = candidates[:, 1:].contiguous()
    target_temperatures = arguments["target_temperatures"].view(batch, 1)
    draft_temperatures = arguments["draft_temperatures"].view(batch, 1)
    sampling = SimpleNamespace(need_top_k_sampling=False, need_top_p_sampling=False, temperatures=target_temperatures)

    def draft_probs() -> Tensor:
        if draft_logits is None:
            shape = (batch, rows - 1, vocab)
            one_hot = torch.zeros(shape, dtype=torch.float32, device=candidates.device)
            return one_hot.scatter_(-1, drafts.unsqueeze(-1), 1.0)
        flat = SoftmaxTemp.execute(
            logits=draft_logits.reshape(batch * (rows - 1), vocab),
            temperatures=draft_temperatures,
            rows_per_request=rows - 1,
        )
        probabilities: Tensor = flat.view(batch, rows - 1, vocab)
        return probabilities

    def accept() -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = AcceptSampling.execute(
            candidates=candidates,
            target_logits=arguments["target_logits"],
            draft_probs=draft_probs(),
            sampling_info=sampling,
            draft_input=None,
            gamma=rows - 1,
            verify_num_draft_tokens=rows,
        )
        return found

    return _finalized(arguments, accept, comparable=False)


def _blockwise_rejection(arguments: Arguments) -> Call:
    from sglang.kernels.ops.speculative.dspark.blockwise_rejection import BlockwiseRejection, make_rejection_noise

    noise = make_rejection_noise(7, arguments["candidates"].device)

    def accept() -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = BlockwiseRejection.execute(
            candidates=arguments["candidates"],
            target_logits=arguments["target_logits"],
            draft_logits=arguments["draft_logits"],
            target_temperatures=arguments["target_temperatures"],
            draft_temperatures=arguments["draft_temperatures"],
            noise=noise,
        )
        return found

    return _finalized(arguments, accept, comparable=False)


class _OneRank:
    """SGLang's agreement between ranks, where there is one rank."""

    def sync(self, site: Any, values: Tensor) -> Tensor:
        return values


def _markov_block(arguments: Arguments) -> Call:
    from sglang.srt.models.dspark import VanillaMarkov
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_markov_block

    vocab, rank = arguments["markov_w1"].shape
    with torch.device("meta"):
        head = VanillaMarkov(vocab_size=vocab, markov_rank=rank)
    head.markov_w1.weight = nn.Parameter(arguments["markov_w1"], requires_grad=False)
    head.markov_w2.weight = nn.Parameter(arguments["markov_w2"], requires_grad=False)
    noise = DraftNoise(key=arguments["noise_key"], offset=arguments["noise_offset"].clone())
    step_logits = arguments["out_step_logits"]

    def call() -> Outputs:
        tokens, _ = draft_markov_block(
            markov_head=head,
            base_logits=arguments["base_logits"],
            anchor_tokens=arguments["anchor_tokens"],
            draft_hidden=None,
            step_temperatures=arguments["temperatures"],
            noise=noise,
            tp_sync=_OneRank(),
            logits_out=step_logits,
            greedy_draft=step_logits is None,
        )
        return {"out_draft_tokens": tokens}  # of the same noise in the first call only: each block advances it

    return call


def _window(arguments: Arguments, *, one_launch: bool) -> Call:
    """Positions and cache locations as ``alloc_verify_window`` computes them, and the anchors' column of the draft."""
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func

    batch, rows = arguments["out_positions"].shape
    seq_lens, anchors = arguments["seq_lens"], arguments["anchor_tokens"]
    offsets = torch.arange(rows, device=seq_lens.device)
    draft_ids = torch.full_like(arguments["out_draft_ids"], arguments["mask_token"])
    placed = torch.empty_like(arguments["out_positions"])

    def locations(**written: Tensor) -> Tensor:
        found: Tensor = assign_extend_cache_locs_uniform_func(
            req_pool_indices=arguments["req_pool_indices"],
            req_to_token=arguments["req_to_token"],
            start_offset=seq_lens,
            batch_size=batch,
            draft_token_num=rows,
            device=seq_lens.device,
            **written,
        )
        return found.view(batch, rows)

    def call() -> Outputs:
        if one_launch:
            where = locations(positions_out=placed, anchor_src=anchors, anchor_out=draft_ids)
            return {"out_positions": placed, "out_cache_locs": where, "out_draft_ids": draft_ids}
        where = locations()
        positions = seq_lens.unsqueeze(1) + offsets
        draft_ids[:, 0].copy_(anchors)
        return {"out_positions": positions, "out_cache_locs": where, "out_draft_ids": draft_ids}

    return call


def _context_kv(arguments: Arguments) -> Call:
    from sglang.kernels.ops.memory.ptr_table import make_ptr_table
    from sglang.kernels.ops.speculative.dspark.fused_kv_write import fused_kv_norm_rope_write

    projected = arguments["projected_kv"]
    if projected.dtype is not torch.bfloat16:
        raise PeerUnavailableError(f"SGLang's fused write takes bfloat16 only, not {projected.dtype}")
    rows, layers, _, heads, size = projected.shape
    buffers = zip(arguments["out_keys"], arguments["out_values"], strict=True)
    table = [[keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0)] for keys, values in buffers]
    meta = make_ptr_table(table, device=projected.device)
    flat = projected.view(rows, -1)
    positions, locations = arguments["positions"].flatten(), arguments["cache_locs"].flatten()

    def call() -> Outputs:
        fused_kv_norm_rope_write(
            flat,
            meta,
            arguments["k_norm_weights"],
            arguments["cos_sin"],
            positions,
            locations,
            layers,
            heads * size,
            size,
            arguments["eps"],
            commit_lens=arguments["commit_lens"],
            locs_row_width=arguments["positions"].shape[1],
        )
        return {}

    return call


_PEERS: dict[str, tuple[tuple[str, str, Callable[[Arguments], Call]], ...]] = {
    "greedy_accept": (
        ("engine-eager", "AcceptGreedy, FinalizeAcceptLens, BuildOutTokens", _accept_greedy),
        ("engine-switches", "row argmax and static_accept_tail", _accept_tail),
    ),
    "sampled_accept": (
        ("engine-eager", "softmax of both, AcceptSampling, FinalizeAcceptLens, BuildOutTokens", _accept_sampling),
        ("engine-switches", "BlockwiseRejection, FinalizeAcceptLens, BuildOutTokens", _blockwise_rejection),
    ),
    "draft_block": (("engine", "draft_markov_block, which SGLang folds into the draft's graph", _markov_block),),
    "step_inputs": (
        (
            "engine-eager",
            "positions added, cache locations gathered, anchors copied",
            lambda arguments: _window(arguments, one_launch=False),
        ),
        (
            "engine-switches",
            "the same in the one launch of prepare_inputs_once",
            lambda arguments: _window(arguments, one_launch=True),
        ),
    ),
    "context_kv": (("engine", "fused_kv_norm_rope_write on projected KV", _context_kv),),
}
