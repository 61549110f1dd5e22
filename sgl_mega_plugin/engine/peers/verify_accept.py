"""SGLang's accepts, eager and behind its switches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from sgl_mega_plugin.engine.peers.peer import Arguments, Call, Outputs, PeerUnavailableError, engine_peer


def _accept_greedy(arguments: Arguments) -> Call:
    if arguments["target_logits"] is None:
        raise PeerUnavailableError("SGLang's greedy accept takes logits, not their argmax")
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

    def target_tokens() -> Tensor:
        if arguments["target_tokens"] is not None:
            known: Tensor = arguments["target_tokens"]
            return known.view(-1)
        found: Tensor = _row_argmax(arguments["target_logits"], fused=True)
        return found.view(-1)

    def call() -> Outputs:
        static_accept_tail(
            candidates=arguments["candidates"],
            target_predict=target_tokens(),
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


def _cut(arguments: Arguments) -> Call:
    """The filtered probabilities that SGLang's verify makes of the logits: another form of the same filter."""
    from sglang.srt.speculative.dflash_utils import build_speculative_verify_target_probs

    if bool((arguments["min_ps"] > 0).any()):
        raise PeerUnavailableError("SGLang's verify leaves min_p out")
    batch, vocab = len(arguments["verify_lens"]), arguments["target_logits"].shape[1]
    top_k = int(arguments["top_ks"].max())
    sampling = SimpleNamespace(
        need_top_k_sampling=top_k < vocab,
        need_top_p_sampling=bool((arguments["top_ps"] < 1).any()),
        temperatures=arguments["temperatures"].view(batch, 1),
        top_ks=arguments["top_ks"],
        top_ps=arguments["top_ps"],
    )

    def call() -> Outputs:
        build_speculative_verify_target_probs(
            next_token_logits=arguments["target_logits"],
            sampling_info=sampling,
            draft_token_num=len(arguments["target_logits"]) // batch,
            bs=batch,
            max_top_k=top_k,
            uniform_top_k_value=top_k,
        )
        return {}

    return call


PEERS = {
    "greedy_accept": (
        engine_peer("engine-eager", "AcceptGreedy, FinalizeAcceptLens, BuildOutTokens", _accept_greedy),
        engine_peer("engine-switches", "row argmax and static_accept_tail", _accept_tail),
    ),
    "sampled_accept": (
        engine_peer(
            "engine-eager", "softmax of both, AcceptSampling, FinalizeAcceptLens, BuildOutTokens", _accept_sampling
        ),
        engine_peer("engine-switches", "BlockwiseRejection, FinalizeAcceptLens, BuildOutTokens", _blockwise_rejection),
    ),
    "sampling_cutoffs": (
        engine_peer("engine-eager", "build_speculative_verify_target_probs: softmax, top-k, top-p", _cut),
    ),
}
