"""`blockwise_rejection`'s kernels beyond their cases: law, counter, rows, every place of a rejection."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.common.case_tools import generator
from sgl_mega_slots.verify_accept import sizes
from sgl_mega_slots.verify_accept.blockwise_rejection.cases import NOISE_KEY, P, Q, arguments, block, mixed
from sgl_mega_slots.verify_accept.blockwise_rejection.launch import BlockwiseRejection, BlockwiseRejectionLaunch
from sgl_mega_slots.verify_accept.blockwise_rejection.reference import accept_coins, gumbel_noise, sampled_accept

_INF = float("inf")
R = (0.1, 0.2, 0.3, 0.4)


def _run(values: dict[str, Any], **sizes: int) -> dict[str, list[Any]]:
    batch, rows = values["candidates"].shape
    vocab = values["target_logits"].shape[-1]
    wanted = {"max_batch": batch, "gamma": rows - 1, "vocab_size": vocab} | sizes
    BlockwiseRejection(SlotSetup(backend=Backend.INTERPRETER, device="cpu", **wanted))(**values)
    return {name[4:]: value.tolist() for name, value in values.items() if name.startswith("out_")}


@pytest.mark.parametrize("one_hot", [False, True], ids=["kept", "one-hot"])
def test_blocks_have_the_targets_law(one_hot: bool) -> None:
    laws, batch, seen = (P, R, P), 64, 5
    target = torch.tensor(laws).log().repeat(batch, 1)
    drafted = torch.tensor([(0.4, 0.3, 0.3, 0.0)] * 2 if one_hot else [Q, P])
    draft = None if one_hot else drafted.log().expand(batch, -1, -1)
    source, correct, tokens = generator(3), [], []
    for offset in range(seen):
        picks = [torch.multinomial(law, batch, replacement=True, generator=source) for law in drafted]
        candidates = torch.stack([picks[0] * 0, *picks], dim=1)
        found = _run(arguments(target, draft, candidates, [1.0] * batch, noise_offset=offset))
        correct += found["correct_lens"]
        tokens += found["tokens"]
    assert set(correct) == {0, 1, 2}
    for place, law in enumerate(laws):
        reached = [row[place] for row, length in zip(tokens, correct, strict=True) if length >= place]
        for token, probability in enumerate(law):
            # Five standard deviations of a binomial count.
            bound = 5 * math.sqrt(probability * (1 - probability) / len(reached))
            error = abs(reached.count(token) / len(reached) - probability)
            assert error <= bound, f"place {place}, id {token}: off by {error}, bound {bound}"


def test_each_offset_draws_anew_and_the_same_again() -> None:
    def bonus(offset: int) -> list[int]:
        flat = torch.zeros(16 * 2, 64)
        return _run(arguments(flat, None, torch.tensor([[0, 64]] * 16), [1.0] * 16, noise_offset=offset))[
            "bonus_tokens"
        ]

    draws = [bonus(offset) for offset in (0, 1, 2, 0)]
    assert draws[0] == draws[3]
    assert len({str(draw) for draw in draws}) == 3
    assert len(set(draws[0])) > 8, "rows with equal logits draw alike"


def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    temperatures = mixed(5)
    target, draft, candidates = block(5, 4, 90, temperatures, 8)
    five = _run(arguments(target, draft, candidates, temperatures))
    for rows in (1, 2):
        few = _run(arguments(target[: rows * 4], draft[:rows], candidates[:rows], temperatures[:rows]), max_batch=9)
        assert all(few[name] == values[:rows] for name, values in five.items())
    monkeypatch.setattr(sizes, "ENOUGH", 1)  # larger blocks, as in a large batch
    assert BlockwiseRejectionLaunch.plan(backend=Backend.INTERPRETER, batch=5, rows=4, vocab=90).block_n == 32
    assert _run(arguments(target, draft, candidates, temperatures)) == five


def test_equal_laws_accept_whatever_the_coin() -> None:
    """One of these rows has a coin that is nearer to 1 than fp32 logarithms resolve."""
    batch, offset = 8, 2_480_888
    assert accept_coins(batch, 2, NOISE_KEY, torch.tensor([offset])).max().item() == 1 - 3 * 2.0**-24
    for temperature in (0.3, 1.0, 1.7):
        target = torch.randn(2, 70, generator=generator(4)).repeat(batch, 1)
        draft = target.view(batch, 2, 70)[:, :1]
        values = arguments(target, draft, torch.tensor([[0, 9]] * batch), [temperature] * batch, noise_offset=offset)
        assert _run(values)["correct_lens"] == [1] * batch


def test_a_refusal_with_nothing_left_takes_p() -> None:
    """q of the draft is 5e-7 of it above p, p as little above q elsewhere, and a coin is nearer to 1 than that."""
    offset, row = 2_480_888, 5
    p = torch.tensor([0.0, 0.0, -_INF, -_INF])
    q = torch.tensor([0.0, 1e-6, -_INF, -_INF])
    values = arguments(p.repeat(16, 1), q.expand(8, 1, 4), torch.tensor([[0, 1]] * 8), [1.0] * 8, noise_offset=offset)
    noise = gumbel_noise(8, 4, values["noise_key"], values["noise_offset"])[row]
    assert noise[1] > noise[0] + 1
    found = _run(values)
    assert found["correct_lens"] == [0 if other == row else 1 for other in range(8)]
    assert found["bonus_tokens"][row] == 1


@pytest.mark.parametrize("seed", range(3))
def test_random_mixed_batches_equal_the_reference(seed: int) -> None:
    temperatures = mixed(6)
    target, draft, candidates = block(6, 5, 75, temperatures, 30 + seed, apart=1.0)
    lens = torch.randint(0, 6, (6,), generator=generator(seed)).tolist()
    values = arguments(target.bfloat16(), draft, candidates, temperatures, noise_offset=seed, verify_lens=lens)
    expected = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    sampled_accept(**expected)
    for name, found in _run(values).items():
        assert found == expected[f"out_{name}"].tolist(), name
