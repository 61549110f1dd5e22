"""SGLang's own static epilogue for a DeepSeek-V4.1 target, on small CPU tensors.

Built with the parameters that ``DSparkWorkerV2`` takes from the environment. The draft's KV pool and projection are
stand-ins: a row of KV is the first features of its hidden state, written where SGLang's injector says.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

B, ROWS, VOCAB, HIDDEN, SLOTS, TOKENS = 3, 6, 40, 8, 7, 64  # of the request table and of the KV pool
FEATURES = 2  # of a KV row
HISTORY = 3  # tokens of the n-gram history
PADDED = 1  # the last row of the batch is padding


class Pool:
    """The draft's KV pool: sliding-window rows are those of the full pool."""

    swa_req_ring_size = None
    full_to_swa_index_mapping = torch.arange(TOKENS)

    def __init__(self) -> None:
        self.rows = torch.full((TOKENS, FEATURES), -1.0)

    def set_swa_key_buffer_radix_fused_norm_rope(self) -> None:
        """Its presence makes SGLang fold the commit."""

    def translate_loc_from_full_to_swa(self, loc: Tensor) -> Tensor:
        return self.full_to_swa_index_mapping[loc]

    def write(self, loc: Tensor, rows: Tensor) -> None:
        kept = loc >= 0
        self.rows[loc[kept].long()] = rows[kept].float()


class Draft:
    """Projection and store of the draft's context KV, in one call or in two."""

    def project_commit_kv(self, *, main_hidden: Tensor, pool: Pool) -> list[Tensor]:
        return [main_hidden[:, :FEATURES]]

    def store_commit_kv(self, *, kvs: list[Tensor], swa_loc: Tensor, positions: Tensor, pool: Pool) -> None:
        pool.write(swa_loc, kvs[0])

    def write_target_hidden_kv(self, *, main_hidden: Tensor, swa_loc: Tensor, positions: Tensor, pool: Pool) -> None:
        kvs = self.project_commit_kv(main_hidden=main_hidden, pool=pool)
        self.store_commit_kv(kvs=kvs, swa_loc=swa_loc, positions=positions, pool=pool)


class Built:
    """The epilogue with what it writes to, and a step's inputs."""

    def __init__(self, *, history: Tensor | None = None, simulated: int | None = None) -> None:
        from sglang.srt.environ import envs
        from sglang.srt.speculative.dspark_components import dspark_verify as verify
        from sglang.srt.speculative.dspark_components.dspark_deferred_commit import DeferredContextCommit
        from sglang.srt.speculative.dspark_components.dspark_kv_inject import TargetHiddenKvInjector
        from sglang.srt.speculative.spec_tp_sync import SpecTpSync

        self.pool = Pool()
        offsets = torch.arange(ROWS)
        injector = TargetHiddenKvInjector(
            draft_model=Draft(),
            draft_model_runner=SimpleNamespace(token_to_kv_pool=self.pool),
            model_runner=SimpleNamespace(device="cpu"),
            device="cpu",
            verify_num_draft_tokens=ROWS,
            block_pos_offsets=offsets,
        )
        self.deferred = None
        if envs.SGLANG_DSPARK_DEFER_CONTEXT_KV.get():
            self.deferred = DeferredContextCommit(max_bs=B, stride=ROWS, device="cpu", kv_injector=injector)
        self.tp_sync = SpecTpSync(SimpleNamespace(world_size=1, rank_in_group=0))
        folds_history = envs.SGLANG_OPT_DSV41_POST_FORWARD_CUDA_GRAPH.get() and history is not None
        self.epilogue = verify.DsparkVerifyEpilogue(
            max_bs=B,
            verify_num_draft_tokens=ROWS,
            device="cpu",
            tp_sync=self.tp_sync,
            fused_argmax=True,
            simulated_correct_len=None if simulated is None else torch.tensor([simulated]),
            simulate_fold=envs.SGLANG_DSPARK_SIMULATE_FOLD.get(),
            fused_accept_tail=envs.SGLANG_DSPARK_FUSED_ACCEPT_TAIL.get(),
            accept_tail_min_bs=envs.SGLANG_DSPARK_ACCEPT_TAIL_MIN_BS.get(),
            accept_tail_max_bs=envs.SGLANG_DSPARK_ACCEPT_TAIL_MAX_BS.get(),
            deferred_commit=self.deferred,
            post_fold=envs.SGLANG_OPT_DSV41_DSPARK_POST_FOLD.get(),
            commit_ctx=verify.CommitInjectCtx(
                draft_model=Draft(),
                block_pos_offsets=offsets,
                resolve_pool=lambda: self.pool,
                resolve_req_to_token=lambda: torch.zeros(SLOTS, TOKENS),
                kv_injector=injector,
                resolve_engram_hasher=(lambda: SimpleNamespace(history=history)) if folds_history else None,
            ),
        )

    def arm(self) -> None:
        """The host's part of a step with ``B - PADDED`` requests, every output poisoned."""
        epilogue = self.epilogue
        kept = ("inject_gate_buf", "verify_lens_buf", "draft_tokens_buf")
        for name, value in vars(epilogue).items():
            if isinstance(value, Tensor) and name.endswith("_buf") and name not in kept:
                value.fill_(-7)
        epilogue.begin_static_step(B - PADDED, armed=True)

    def written(self) -> list[int]:
        """Places of the KV pool that hold something."""
        return (self.pool.rows[:, 0] != -1.0).nonzero().view(-1).tolist()

    def outputs(self) -> dict[str, Any]:
        """What a step leaves behind, of the live rows."""
        live = B - PADDED
        accept = self.epilogue.read_accept(live)
        named = {name: getattr(accept, name).tolist() for name in type(accept).__struct_fields__}
        return named | {"kv": self.pool.rows.tolist()}


def step(seed: int, accepted: tuple[int, ...] = (2, 5, 0)) -> Any:
    """A verify graph's inputs and outputs whose greedy accept takes ``accepted`` drafts of each row."""
    from sglang.srt.speculative.dspark_components.dspark_verify import StaticVerifyIO

    numbers = torch.Generator().manual_seed(seed)
    logits = torch.randn(B * ROWS, VOCAB, generator=numbers)
    best = logits.argmax(dim=-1).view(B, ROWS)
    drafts = best[:, :-1].clone()
    for row, length in enumerate(accepted):
        drafts[row, length:] = (drafts[row, length:] + 1) % VOCAB
    anchors = torch.randint(0, VOCAB, (B, 1), generator=numbers)
    seq_lens = torch.tensor([11, 4, 1])
    return StaticVerifyIO(
        candidates=torch.cat([anchors, drafts], dim=1),
        logits=logits,
        hidden=torch.randn(B * ROWS, HIDDEN, generator=numbers),
        seq_lens=seq_lens,
        req_pool_indices=torch.tensor([5, 2, 0]),
        out_cache_loc=torch.randperm(TOKENS, generator=numbers)[: B * ROWS],
        positions=(seq_lens[:, None] + torch.arange(ROWS)).reshape(-1),
    )


def greedy(built: Built, io: Any) -> bool:
    """The greedy part that SGLang records in the verify graph; whether the n-gram history was committed."""
    epilogue = built.epilogue
    return bool(epilogue.run_static(io, accept=epilogue._accept_static_greedy, gate=epilogue.inject_gate_buf))


def sampler(seed: int) -> Any:
    """What a sampled accept reads of the draft's sampler: temperatures, and the logits of each step."""
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftParams

    temperatures = torch.tensor([0.7, 1.0, 1.0])
    logits = torch.randn(B, ROWS - 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    params = DraftParams(
        temperatures=temperatures, greedy_mask=torch.zeros(B, dtype=torch.bool), step_temperatures=temperatures
    )
    return SimpleNamespace(params=params, greedy_draft=False, step_logits=logits)


def region(built: Built, io: Any, draft_sampler: Any, noise: Any) -> Any:
    """SGLang's sampling-accept region, which runs eagerly the first time and wants a CUDA graph the second."""
    from sglang.srt.speculative.dspark_components.dspark_sampling_accept_graph import DsparkSamplingAcceptGraph

    built.epilogue.static_io[B] = io  # SGLang does this while it captures the verify graph
    return DsparkSamplingAcceptGraph(
        epilogue=built.epilogue,
        resolve_draft_sampler=lambda: draft_sampler,
        tp_sync=built.tp_sync,
        fused_argmax=True,
        block_verification=False,
        device="cpu",
        rejection_noise=noise,
    )


def interpreted(seed: int) -> dict[str, Any]:
    """What has Triton kernels alone, in a process whose Triton interprets: the n-gram history and the older rejection.

    Returns the step's candidates and outputs with the history, and the commit lengths of the region and of the
    eager accept at the same state of torch's generator.
    """
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult
    from sglang.srt.speculative.dspark_components.dspark_sampling_accept_graph import GraphSamplingInfo
    from sglang.srt.speculative.dspark_components.dspark_verify import accept_draft_tokens

    before = torch.arange(SLOTS * HISTORY, dtype=torch.int32).view(SLOTS, HISTORY)
    history = before.clone()
    built, io = Built(history=history), step(seed)
    built.arm()
    found = {"committed": greedy(built, io), "before": before.tolist(), "history": history.tolist()}
    found |= {"candidates": io.candidates.tolist(), "commit_lens": built.outputs()["commit_lens"]}
    sampled, draft_sampler = Built(), sampler(seed)
    sampled.arm()
    torch.manual_seed(seed)
    region(sampled, io, draft_sampler, None).run(bs=B - PADDED, target_logits=io.logits)
    torch.manual_seed(seed)
    params = draft_sampler.params
    lengths, bonus, _ = accept_draft_tokens(
        candidates=io.candidates,
        target_logits=io.logits,
        draft_block=DraftBlockResult(
            draft_tokens=io.candidates[:, 1:],
            corrected_logits=draft_sampler.step_logits,
            greedy_mask=params.greedy_mask,
            temperatures=params.temperatures,
            greedy_draft=False,
        ),
        sampling_info=GraphSamplingInfo(temperatures=params.temperatures),
        draft_input=None,
        gamma=ROWS - 1,
        verify_num_draft_tokens=ROWS,
    )
    live, outputs = B - PADDED, sampled.outputs()
    return found | {
        "region": (outputs["correct_len"], outputs["bonus"]),
        "eager": (lengths[:live].tolist(), bonus[:live].tolist()),
    }
