"""Random numbers, draws, and the accept rule: exact decisions first, the law after."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.embedded.sampling import (
    Accepted,
    accept_noise,
    draw,
    greedy,
    mix,
    murmur,
    one_hot,
    philox,
    probabilities,
    sampled_accept,
    uniforms,
)

P, Q = (0.5, 0.3, 0.2, 0.0), (0.2, 0.3, 0.5, 0.0)
DRAWS = 20_000
SIGMAS = 5.0  # a false alarm once in 1.7 million comparisons; the seeds are fixed besides


def law(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).unsqueeze(0)


def assert_frequencies(ids: Tensor, wanted: tuple[float, ...]) -> None:
    for token, p in enumerate(wanted):
        count, expected = int((ids == token).sum()), p * len(ids)
        bound = SIGMAS * math.sqrt(expected * (1 - p))
        assert abs(count - expected) <= bound, f"id {token}: {count} draws, expected {expected:.0f} +- {bound:.0f}"


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        pytest.param(0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), id="zeros"),
        pytest.param(
            0xFFFFFFFFFFFFFFFF, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD), id="ones"
        ),
        pytest.param(
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            id="pi",
        ),
    ],
)
def test_philox_known_answers(key: int, counter: tuple[int, int, int, int], words: tuple[int, ...]) -> None:
    """Known answers of Philox4x32-10 from the authors' Random123 library."""
    first, *rest = counter
    assert philox(key, (torch.tensor(first), *rest)).tolist() == list(words)  # type: ignore[arg-type]


# Values of MurmurHash3_x86_32 for bytes of no tail: the reference implementation's, seed 0.
@pytest.mark.parametrize(
    ("data", "value"),
    [(b"", 0), (b"\0\0\0\0", 0x2362F9DE), (b"\xff\xff\xff\xff", 0x76293B50), (b"!Ce\x87", 0xF55B516B)],
)
def test_murmur_known_answers(data: bytes, value: int) -> None:
    words = [torch.tensor(int.from_bytes(data[i : i + 4], "little")) for i in range(0, len(data), 4)]
    assert not words or int(murmur(*words)) == value


def test_numbers_do_not_depend_on_the_batch() -> None:
    keys, steps = torch.tensor([7, 8, 7]), torch.tensor([0, 0, 1])
    together = uniforms(keys, steps)
    for row in range(3):
        assert together[row] == uniforms(keys[row : row + 1], steps[row : row + 1])
    assert len(together.unique()) == 3
    assert ((together > 0) & (together < 1)).all()


def test_accept_noise_is_apart_by_offset_row_and_id() -> None:
    seen = [accept_noise(5, torch.tensor([offset]), 3, 4, 6) for offset in (0, 1, 2**40)]
    coins, noise = (torch.stack(numbers) for numbers in zip(*seen, strict=True))
    assert len(coins.unique()) == coins.numel() == 36
    assert len(noise.unique()) == noise.numel() == 54
    assert ((coins > 0) & (coins < 1)).all()
    alone = accept_noise(5, torch.tensor([1]), 1, 4, 6)
    assert torch.equal(alone[0][0], coins[1, 0])
    assert torch.equal(alone[1][0], noise[1, 0])


def test_keys_depend_on_every_value_and_its_place() -> None:
    keys = {mix(), mix(0), mix(1), mix(0, 0), mix(0, 1), mix(1, 0), mix(-1)}
    assert len(keys) == 7
    assert all(0 <= key < 2**64 for key in keys)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("logits", "token"),
    [
        pytest.param([1.0, 2.0, 2.0], 1, id="lowest-of-equals"),
        pytest.param([NAN, 2.0, 3.0], 2, id="nan-loses"),
        pytest.param([NAN, NAN, NAN], 0, id="all-nan"),
        pytest.param([-INF, -INF, -INF], 0, id="all-minus-inf"),
        pytest.param([-INF, NAN, -9.0], 2, id="one-finite"),
        pytest.param([0.0, INF, INF], 1, id="plus-inf"),
    ],
)
def test_dead_rows(logits: list[float], token: int) -> None:
    row = torch.tensor([logits])
    assert greedy(row).item() == token
    for temperature in (0.0, 0.7):
        probs = probabilities(row, torch.tensor([temperature]))
        assert probs.sum().item() == pytest.approx(1.0, abs=1e-12)  # fp64 sum of three
        assert not probs.isnan().any()
        assert (probs[0][torch.tensor(logits).isnan()][1:] == 0).all()
    assert draw(probabilities(row, torch.tensor([0.0])), torch.tensor([0.999])).item() == token


def test_temperature_divides_logits() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    probs = probabilities(logits, torch.tensor([0.5, 2.0]))
    wanted = torch.tensor([[0.0, 2.0], [0.0, 0.5]], dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(probs, wanted, rtol=1e-12, atol=0)  # fp64 softmax of two


@pytest.mark.parametrize(
    ("number", "token"),
    [(0.0, 1), (0.2499, 1), (0.25, 3), (0.9999999, 3), (1 - 2**-33, 3)],
)
def test_draw_skips_what_has_no_probability(number: float, token: int) -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    assert draw(probs, torch.tensor([number], dtype=torch.float64)).item() == token


def accept(
    drafts: list[int], p: Tensor, q: Tensor, coins: list[float], noise: list[float], verify_len: int | None = None
) -> tuple[int, int, list[int]]:
    correct, bonus, tokens = sampled_accept(
        drafts=torch.tensor([drafts]),
        target_probs=p,
        draft_probs=q,
        verify_lens=torch.tensor([len(drafts) + 1 if verify_len is None else verify_len]),
        coins=torch.tensor([coins], dtype=torch.float64),
        noise=torch.tensor([noise], dtype=torch.float64),
    )
    return int(correct), int(bonus), tokens[0].tolist()


FLAT = [0.0] * 4
#: The widest that a uniform of 32 bits makes Gumbel noise: 23 at one id, -2.9 at the others.
TO_ONE = [[23.0 if token == winner else -2.9 for token in range(4)] for winner in range(4)]


@pytest.mark.parametrize("coin", [1e-9, 0.2, 0.399, 0.401, 0.5, 0.999])
@pytest.mark.parametrize("final", range(4))
def test_coin_below_the_ratio_accepts_and_the_residual_has_one_id(coin: float, final: int) -> None:
    correct, bonus, tokens = accept([2], law(P, P), law(Q), [coin], TO_ONE[final])
    if coin < 0.4:
        after = final if P[final] else 0
        assert (correct, bonus, tokens) == (1, after, [2, after])
    else:
        assert (correct, bonus, tokens) == (0, 0, [0, 0])


@pytest.mark.parametrize("token", [0, 1, 2])
@pytest.mark.parametrize("coin", [2.0**-31, 0.5, 1 - 2.0**-24])
def test_equal_laws_accept_everything(token: int, coin: float) -> None:
    correct, _, tokens = accept([token] * 3, law(P, P, P, P), law(P, P, P), [coin] * 3, FLAT)
    assert (correct, tokens) == (3, [token] * 3 + [0])


@pytest.mark.parametrize("refused", range(4))
def test_tokens_after_a_rejection_at_any_position(refused: int) -> None:
    coins = [1e-9] * 3
    if refused < 3:
        coins[refused] = 0.9
    correct, bonus, tokens = accept([2, 2, 2], law(P, P, P, P), law(Q, Q, Q), coins, FLAT)
    assert (correct, bonus, tokens) == (refused, 0, [2] * refused + [0] + [0] * (3 - refused))


@pytest.mark.parametrize("verify_len", [1, 2])
@pytest.mark.parametrize(("coin", "last"), [(0.39, 2), (0.41, 0)])
def test_a_cut_block_tests_the_draft_of_its_last_row(verify_len: int, coin: float, last: int) -> None:
    """It takes the bonus' place where it stands, so the last token has the law p as well."""
    coins = [1e-9, 1e-9]
    coins[verify_len - 1] = coin
    correct, bonus, tokens = accept([2, 2], law(P, P, P), law(Q, Q), coins, TO_ONE[1], verify_len)
    assert (correct, bonus) == (verify_len - 1, last)
    assert tokens == [2] * (verify_len - 1) + [last] + [0] * (3 - verify_len)


@pytest.mark.parametrize("token", [-1, 4, 2**31 - 1, 3])
def test_drafts_that_q_does_not_have_are_refused_and_p_is_the_law(token: int) -> None:
    """Id 1 is out of the residual, not of p; id 3 is in the vocabulary and has no probability."""
    correct, bonus, tokens = accept([token, 2], law(P, P, P), law(Q, Q), [1e-9, 1e-9], TO_ONE[1])
    assert (correct, bonus, tokens) == (0, 1, [1, 0, 0])


def test_no_residual_leaves_p() -> None:
    assert accept([1], law((0.5, 0.3, 0.2, 0.0), P), law((0.5, 0.4, 0.2, 0.0)), [0.99], TO_ONE[1]) == (0, 1, [1, 0])


def drawn(drafts: Tensor, p: Tensor, q: Tensor, verify_len: int, key: int) -> Accepted:
    """What DRAWS requests of one batch commit."""
    coins, noise = accept_noise(key, torch.tensor([3]), DRAWS, drafts.shape[1], 4)
    return sampled_accept(
        drafts=drafts,
        target_probs=p.expand(DRAWS, -1, -1),
        draft_probs=q,
        verify_lens=torch.full((DRAWS,), verify_len),
        coins=coins,
        noise=noise,
    )


def test_argmax_draft_with_its_one_hot_law() -> None:
    drafts = torch.zeros(DRAWS, 1, dtype=torch.int64)
    assert_frequencies(drawn(drafts, law(P, P), one_hot(drafts, 4), 2, key=1).tokens[:, 0], P)


@pytest.mark.parametrize("verify_len", [1, 2, 3])
def test_sampled_draft_keeps_the_target_law(verify_len: int) -> None:
    """Two steps: the second token is counted where the first was accepted, and must still follow p."""
    q = law(Q, Q).expand(DRAWS, -1, -1)
    keys = torch.arange(DRAWS)
    drafts = torch.stack([draw(q[:, step], uniforms(keys, torch.full_like(keys, step))) for step in range(2)], dim=1)
    result = drawn(drafts, law(P, (0.1, 0.2, 0.3, 0.4), P), q, verify_len, key=2)
    assert_frequencies(result.tokens[:, 0], P)
    if verify_len > 1:
        assert_frequencies(result.tokens[result.correct >= 1, 1], (0.1, 0.2, 0.3, 0.4))
