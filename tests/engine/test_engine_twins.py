"""Our slots' references against SGLang's own torch code of the same steps, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative.dspark.blockwise_rejection import RejectionNoise, blockwise_rejection_torch
from sglang.kernels.ops.speculative.dspark.dspark_accept import AcceptGreedy, FinalizeAcceptLens
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import BuildOutTokens
from sglang.kernels.ops.speculative.dspark.markov_sample import MarkovSampleStep
from torch import Tensor

from sgl_mega_plugin.registry import Registry, load_reference
from sgl_mega_slots.verify_accept.blockwise_rejection.cases import arguments, block
from sgl_mega_slots.verify_accept.blockwise_rejection.reference import decide


def _call(slot: str, **arguments: Any) -> None:
    load_reference(Registry.discover().get(slot))(**arguments)


def _drafts_with_matches(draw: torch.Generator, logits: Tensor, batch: int, rows: int, vocab: int) -> Tensor:
    """Candidates [B, T] whose drafts agree with the argmax about three times in four."""
    winners = logits.view(batch, rows, vocab).argmax(-1)
    wrong = torch.randint(0, vocab, (batch, rows), generator=draw)
    keep = torch.rand(batch, rows, generator=draw) < 0.75
    return torch.cat([wrong[:, :1], torch.where(keep, winners, wrong)[:, :-1]], dim=1)


@pytest.mark.parametrize("capped", [False, True], ids=["static", "capped-lengths"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("batch", "rows", "vocab"), [(1, 2, 5), (3, 8, 37), (64, 4, 129)])
def test_accept_tail_is_sglangs_greedy_accept(
    batch: int, rows: int, vocab: int, dtype: torch.dtype, capped: bool
) -> None:
    draw = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-9, 10, (batch * rows, vocab), generator=draw).to(dtype)  # integers, so that ties occur
    candidates = _drafts_with_matches(draw, logits, batch, rows, vocab)
    seq_lens = torch.randint(1, 1000, (batch,), generator=draw)
    lens = torch.randint(1, rows + 1, (batch,), generator=draw) if capped else torch.full((batch,), rows)
    verify_lens = lens.int()

    correct, bonus, trimmed = AcceptGreedy.torch(
        candidates=candidates,
        target_logits=logits,
        verify_num_draft_tokens=rows,
        cutoff_verify_lens=verify_lens if capped else None,
    )
    lengths = FinalizeAcceptLens.torch(correct_len=correct, cap_trim_lens=trimmed, prefix_lens=seq_lens)
    tokens = BuildOutTokens.torch(
        draft_tokens=candidates[:, 1:],
        correct_len=correct,
        bonus=bonus,
        verify_num_draft_tokens=rows,
        gamma=rows - 1,
    )
    out = {
        "out_correct_lens": torch.full((batch,), -7, dtype=torch.int32),
        "out_bonus_tokens": torch.full((batch,), -7),
        "out_commit_lens": torch.full((batch,), -7, dtype=torch.int32),
        "out_new_seq_lens": torch.full_like(seq_lens, -7),
        "out_tokens": torch.full((batch, rows), -7),
    }
    _call(
        "accept_tail",
        candidates=candidates,
        target_logits=logits,
        target_tokens=None,
        seq_lens=seq_lens,
        verify_lens=verify_lens,
        simulated_correct=None,
        **out,
    )
    # SGLang leaves rejected drafts behind the bonus, where nothing reads; the seam has zeros there.
    read = torch.arange(rows) <= correct[:, None]
    want = {
        "out_correct_lens": correct.int(),
        "out_bonus_tokens": bonus,
        "out_commit_lens": lengths.commit_lens,
        "out_new_seq_lens": lengths.new_seq_lens,
        "out_tokens": torch.where(read, tokens, 0),
    }
    for name, value in want.items():
        torch.testing.assert_close(out[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert int(correct.max()) > int(correct.min()) or batch == 1, "the case tries one accept length only"


def _shared_noise(noise: RejectionNoise, batch: int, gamma: int, vocab: int) -> tuple[Tensor, Tensor]:
    """The coins and the Gumbel noise that SGLang's torch twin draws for a key and counter."""
    source = torch.Generator().manual_seed((noise.key + int(noise.counter) * 1_000_003) % 2**63)
    coins = torch.rand(batch, gamma, generator=source).clamp_min(2.0**-31)
    return coins, -torch.log(-torch.log(torch.rand(batch, vocab, generator=source)))


@pytest.mark.parametrize("capped", [False, True], ids=["static", "capped-lengths"])
@pytest.mark.parametrize("one_hot", [False, True], ids=["kept", "one-hot"])
@pytest.mark.parametrize(("batch", "rows", "vocab"), [(64, 2, 5), (64, 8, 37), (32, 4, 501)])
def test_blockwise_rejection_decides_as_sglang_does(
    batch: int, rows: int, vocab: int, one_hot: bool, capped: bool
) -> None:
    """On shared noise, in fp32 there and fp64 here: no decision of these is as near as 2**-16."""
    temperatures = [(0.5, 0.8, 1.0, 1.4)[row % 4] for row in range(batch)]
    target, draft, candidates = block(batch, rows, vocab, temperatures, seed=vocab, apart=0.1)
    logits = None if one_hot else draft
    lens = torch.randint(1, rows + 1, (batch,), generator=torch.Generator().manual_seed(1)).int()
    lens = lens if capped else torch.full_like(lens, rows)
    noise = RejectionNoise(key=77, counter=torch.tensor([3]))
    coins, gumbel = _shared_noise(noise, batch, rows - 1, vocab)
    common = {"candidates": candidates, "draft_logits": logits}
    common |= {"target_temperatures": torch.tensor(temperatures), "draft_temperatures": torch.tensor(temperatures)}
    correct, bonus, _ = blockwise_rejection_torch(
        target_logits=target, noise=noise, cutoff_verify_lens=lens if capped else None, **common
    )
    ours = decide(target_logits=target.view(batch, rows, vocab), verify_lens=lens, coins=coins, noise=gumbel, **common)
    assert ours[0].tolist() == correct.tolist()
    assert ours[1].tolist() == bonus.tolist()
    assert len(correct.unique()) == rows or one_hot or capped, "a place sees no rejection"


# SGLang's kernels in Triton's interpreter, which fixes the mode at import and has no libdevice.
_ENGINE_KERNELS = """
import json, sys, torch, triton, triton.language as tl
from types import SimpleNamespace
from sglang.kernels.ops.speculative.dspark import blockwise_rejection as engine
from sgl_mega_slots.verify_accept.blockwise_rejection.cases import arguments, block

@triton.jit
def log1p(x):
    return tl.log(1.0 + x)

engine.libdevice = SimpleNamespace(log1p=log1p)
key, offset, capped, one_hot = json.loads(sys.argv[1])
temperatures = [0.5, 0.8, 1.0, 1.4] * 4
target, draft, candidates = block(16, 4, 97, temperatures, 5)
values = arguments(target, None if one_hot else draft, candidates, temperatures)
lens = torch.tensor([1, 2, 3, 4] * 4) if capped else None
correct, bonus, _ = engine.blockwise_rejection_triton(
    **{name: values[name] for name in ("candidates", "target_logits", "draft_logits")},
    target_temperatures=values["target_temperatures"], draft_temperatures=values["draft_temperatures"],
    noise=engine.RejectionNoise(key=key, counter=torch.tensor([offset])), cutoff_verify_lens=lens,
)
print(json.dumps([correct.tolist(), bonus.tolist()]))
"""


@pytest.mark.parametrize(
    ("key", "offset", "capped", "one_hot"),
    [(0x1234567890ABCDEF, 0, False, False), (1, (1 << 33) + 5, True, False), (0x7FFFFFFFFFFFFFFF, 2, False, True)],
    ids=["kept", "capped", "one-hot"],
)
def test_blockwise_rejection_has_the_numbers_of_sglangs_kernels(
    key: int, offset: int, capped: bool, one_hot: bool
) -> None:
    """The same key and counter: every id and length, so coins and noise are those of the kernels."""
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-W", "ignore", "-c", _ENGINE_KERNELS, json.dumps([key, offset, capped, one_hot])]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    correct, bonus = json.loads(done.stdout.splitlines()[-1])
    temperatures = [0.5, 0.8, 1.0, 1.4] * 4
    target, draft, candidates = block(16, 4, 97, temperatures, 5)
    values = arguments(
        target,
        None if one_hot else draft,
        candidates,
        temperatures,
        noise_key=key,
        noise_offset=offset,
        verify_lens=[1, 2, 3, 4] * 4 if capped else None,
    )
    _call("blockwise_rejection", **values)
    assert values["out_correct_lens"].tolist() == correct
    assert values["out_bonus_tokens"].tolist() == bonus


def test_blockwise_rejection_departs_from_sglang_where_no_draft_can_be() -> None:
    """An id outside [0, V) is not drawn from q, so the law behind it is p. SGLang's kernel keeps max(p - q, 0) there,
    which has no id 1 (its torch code reads out of range)."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    correct, bonus = decide(
        candidates=torch.tensor([[0, 3]]),
        target_logits=p.expand(1, 2, 3),
        draft_logits=q.expand(1, 1, 3),
        target_temperatures=torch.ones(1),
        draft_temperatures=torch.ones(1),
        verify_lens=torch.tensor([2]),
        coins=torch.tensor([[0.5]]),
        noise=torch.tensor([[0.0, 9.0, 0.0]]),
    )
    assert [int(correct), int(bonus)] == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["argmax", "sampled"])
def test_markov_is_sglangs_step(dtype: torch.dtype, temperature: float) -> None:
    batch, gamma, vocab, rank, key = 3, 4, 101, 6, 0x0FED_CBA9_8765_4321
    draw = torch.Generator().manual_seed(3)
    base, w1, w2 = (
        torch.randint(-4, 5, shape, generator=draw).to(dtype)
        for shape in ((batch, gamma, vocab), (vocab, rank), (vocab, rank))
    )  # integers: sums are exact in any order
    anchor = torch.randint(0, vocab, (batch,), generator=draw)
    temperatures, offset = torch.full((batch,), temperature), torch.tensor([2**32 + 5])

    previous, tokens, logits = anchor, [], torch.empty(batch, gamma, vocab, dtype=dtype)
    for step in range(gamma):
        previous = MarkovSampleStep.torch(
            base_logits=base[:, step],
            bias=torch.nn.functional.linear(w1[previous], w2),
            temperatures=temperatures,
            key=key,
            offset=offset,
            step=step,
            step_dtype=dtype,
            logits_out=logits[:, step],
        )
        tokens.append(previous)
    got_tokens = torch.full((batch, gamma), -7)
    got_logits = torch.full((batch, gamma, vocab), torch.nan, dtype=dtype)
    _call(
        "markov", base_logits=base, anchor_tokens=anchor, markov_w1=w1, markov_w2=w2, temperatures=temperatures,
        noise_key=key, noise_offset=offset, out_draft_tokens=got_tokens, out_step_logits=got_logits,
        draft_hidden=None, mixer_weight=None, mixer_bias=None, out_features=None,
    )  # fmt: skip
    torch.testing.assert_close(got_tokens, torch.stack(tokens, dim=1), rtol=0, atol=0)
    if temperature:
        torch.testing.assert_close(got_logits, logits, rtol=0, atol=0)
