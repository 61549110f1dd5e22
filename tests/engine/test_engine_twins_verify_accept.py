"""Simulated acceptance, the argmax given, and the sampling filters against SGLang's own code, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative.dspark.dspark_accept import AcceptGreedy, FinalizeAcceptLens
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import BuildOutTokens
from sglang.kernels.ops.speculative.dspark.static_accept_tail import static_accept_tail_torch
from sglang.srt.speculative.dflash_utils import build_speculative_verify_target_probs
from torch import Tensor

from sgl_mega_slots.common.case_tools import generator
from sgl_mega_slots.common.pick import lowest_argmax
from sgl_mega_slots.verify_accept.accept_tail.cases import arguments as greedy_arguments
from sgl_mega_slots.verify_accept.accept_tail.cases import of_tokens
from sgl_mega_slots.verify_accept.accept_tail.reference import greedy_accept
from sgl_mega_slots.verify_accept.blockwise_rejection.cases import arguments, block
from sgl_mega_slots.verify_accept.blockwise_rejection.reference import sampled_accept
from sgl_mega_slots.verify_accept.sampling_cutoffs.cases import arguments as cutoff_arguments
from sgl_mega_slots.verify_accept.sampling_cutoffs.reference import sampling_cutoffs


def _step(batch: int, rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Logits with ties, and drafts of which three in four are the argmax."""
    draw = generator(batch * rows)
    logits = torch.randint(-9, 10, (batch * rows, vocab), generator=draw).float()
    winners = lowest_argmax(logits).view(batch, rows)
    drafts = torch.randint(0, vocab, (batch, rows), generator=draw)
    keep = torch.rand(batch, rows, generator=draw) < 0.75
    return logits, torch.cat([drafts[:, :1], torch.where(keep, winners, drafts)[:, :-1]], dim=1)


@pytest.mark.parametrize("simulated", [None, 0, 2, 4], ids=lambda value: f"simulated-{value}")
@pytest.mark.parametrize("given", [False, True], ids=["logits", "argmax"])
def test_accept_tail_is_sglangs_static_accept_tail(simulated: int | None, given: bool) -> None:
    batch, rows, vocab = 16, 5, 37
    logits, candidates = _step(batch, rows, vocab)
    values = greedy_arguments(logits, candidates, simulated=simulated)
    outputs = {name: torch.full_like(values[name], -7) for name in values if name.startswith("out_")}
    static_accept_tail_torch(
        candidates=candidates,
        target_predict=lowest_argmax(logits),
        seq_lens=values["seq_lens"],
        verify_lens=values["verify_lens"],
        gate=torch.ones(1, dtype=torch.int32),
        correct_len_out=outputs["out_correct_lens"],
        bonus_out=outputs["out_bonus_tokens"],
        cap_trim_lens_out=torch.zeros(batch, dtype=torch.int32),
        commit_lens_out=outputs["out_commit_lens"],
        new_seq_lens_out=outputs["out_new_seq_lens"],
        out_tokens_out=outputs["out_tokens"],
        simulated_correct_len=values["simulated_correct"],
    )
    greedy_accept(**(of_tokens(values) if given else values))
    read = torch.arange(rows) <= outputs["out_correct_lens"][:, None]  # behind the bonus SGLang leaves drafts
    outputs["out_tokens"] = torch.where(read, outputs["out_tokens"], 0)
    for name, wanted in outputs.items():
        assert torch.equal(values[name], wanted), name
    lengths = len(values["out_correct_lens"].unique())
    assert lengths >= 3 if simulated is None else lengths == 1


def test_simulation_is_sglangs_chain_of_operators() -> None:
    """As ``build_accept_outs`` does it: a greedy accept whose length is replaced, and whose bonus stays."""
    batch, rows, vocab = 8, 4, 23
    logits, candidates = _step(batch, rows, vocab)
    correct, bonus, trimmed = AcceptGreedy.torch(
        candidates=candidates, target_logits=logits, verify_num_draft_tokens=rows
    )
    replaced = torch.full((1,), 2).repeat(batch).to(correct.dtype)
    values = greedy_arguments(logits, candidates, simulated=2)
    lengths = FinalizeAcceptLens.torch(correct_len=replaced, cap_trim_lens=trimmed, prefix_lens=values["seq_lens"])
    tokens = BuildOutTokens.torch(
        draft_tokens=candidates[:, 1:],
        correct_len=replaced,
        bonus=bonus,
        verify_num_draft_tokens=rows,
        gamma=rows - 1,
    )
    greedy_accept(**values)
    assert values["out_bonus_tokens"].tolist() == bonus.tolist()
    assert values["out_commit_lens"].tolist() == lengths.commit_lens.tolist()
    assert values["out_new_seq_lens"].tolist() == lengths.new_seq_lens.tolist()
    assert values["out_tokens"][:, :3].tolist() == tokens[:, :3].tolist()


def test_simulation_departs_from_sglang_past_the_verify_length_and_for_ids_that_are_none() -> None:
    """SGLang would give row 0 three drafts with a verify length of 2, and commit -1 and V in row 1."""
    logits = torch.zeros(8, 9)
    candidates = torch.tensor([[0, 1, 2, 3], [0, -1, 9, 4]])
    values = greedy_arguments(logits, candidates, simulated=3, verify_lens=[2, 4])
    greedy_accept(**values)
    assert values["out_correct_lens"].tolist() == [1, 3]
    assert values["out_tokens"].tolist() == [[1, 0, 0, 0], [0, 0, 4, 0]]


# SGLang's kernels of the simulated bonus in Triton's interpreter, which fixes the mode at import.
_ENGINE_BONUS = """
import json, sys, torch
from sglang.kernels.ops.speculative.dspark.simulated_bonus import simulated_bonus_sample_graph
from sgl_mega_slots.verify_accept.blockwise_rejection.cases import block

seed, correct, temperatures = json.loads(sys.argv[1])
target, _, _ = block(len(temperatures), 4, 97, temperatures, 5)
found = simulated_bonus_sample_graph(
    target_logits=target, correct_len=torch.full((1,), correct).expand(len(temperatures)),
    temperatures=torch.tensor(temperatures), seed=torch.tensor([seed], dtype=torch.int32),
    bs=len(temperatures), rows_per_request=4,
)
print(json.dumps(found.tolist()))
"""


@pytest.mark.parametrize(("seed", "correct"), [(77, 0), (0x7FFFFFFF, 2), (123_456_789, 3)])
def test_the_simulated_bonus_is_sglangs(seed: int, correct: int) -> None:
    """The same seed: every id, so the random numbers are those of SGLang's kernel. Two of eight rows are greedy."""
    temperatures = [0.5, 0.0, 1.0, 1.4, 0.8, 0.0, 3.0, 0.2]
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-W", "ignore", "-c", _ENGINE_BONUS, json.dumps([seed, correct, temperatures])]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    target, draft, candidates = block(8, 4, 97, temperatures, 5)
    values = arguments(target, draft, candidates, temperatures, simulated=correct)
    values["simulated_seed"].fill_(seed)
    sampled_accept(**values)
    assert values["out_bonus_tokens"].tolist() == json.loads(done.stdout.splitlines()[-1])
    assert values["out_correct_lens"].tolist() == [correct] * 8


def _filtered(values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Probabilities [B * T, V] by SGLang's verify, and by our cutoffs."""
    batch = len(values["verify_lens"])
    rows, vocab = values["target_logits"].shape
    info = SimpleNamespace(
        need_top_k_sampling=bool((values["top_ks"] < vocab).any()),
        need_top_p_sampling=bool((values["top_ps"] != 1).any()),
        temperatures=values["temperatures"].view(batch, 1),
        top_ks=values["top_ks"],
        top_ps=values["top_ps"],
    )
    theirs = build_speculative_verify_target_probs(
        next_token_logits=values["target_logits"], sampling_info=info, draft_token_num=rows // batch, bs=batch
    )
    sampling_cutoffs(**values)
    kept = values["target_logits"] >= values["out_cutoffs"][:, None]
    scaled = values["target_logits"] / values["temperatures"].repeat_interleave(rows // batch)[:, None]
    return theirs.view(rows, vocab), torch.where(kept, scaled, -torch.inf).softmax(-1)


@pytest.mark.parametrize(
    ("top_ks", "top_ps"),
    [
        ([20] * 4, [0.95] * 4),
        ([1 << 30] * 4, [0.9, 0.5, 0.99, 0.1]),
        ([1, 5, 50, 1 << 30], [1.0] * 4),
        ([7, 1 << 30, 3, 90], [0.8, 0.7, 1.0, 0.97]),
    ],
    ids=["qwen3", "top-p", "top-k", "mixed"],
)
def test_cutoffs_keep_what_sglangs_verify_keeps(top_ks: list[int], top_ps: list[float]) -> None:
    logits = 3 * torch.randn(16, 101, generator=generator(6))  # no two alike, no sum near a top_p
    values = cutoff_arguments(logits, [0.6, 1.0, 0.3, 1.7], top_ks, top_ps)
    theirs, ours = _filtered(values)
    assert ((theirs > 0) == (ours > 0)).all()
    # Two softmaxes and a renormalization in fp32 of at most 101 terms: 2**-24 each.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=101 * 2.0**-24)


def test_cutoffs_depart_from_sglang_on_ties_and_min_p() -> None:
    """SGLang's verify takes any three of the five that are equal; ours keeps all of them. And it leaves min_p out."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]]).repeat(2, 1)
    theirs, ours = _filtered(cutoff_arguments(logits, [1.0], [4], [1.0]))
    assert (theirs > 0).sum(-1).tolist() == [4, 4]
    assert (ours > 0).sum(-1).tolist() == [6, 6]
    theirs, ours = _filtered(cutoff_arguments(logits, [1.0], [1 << 30], [1.0], [0.5]))
    assert (theirs > 0).sum(-1).tolist() == [7, 7]
    assert (ours > 0).sum(-1).tolist() == [1, 1]
