"""What `blockwise_rejection`'s reference decides: by hand, for every coin and place, and its law by frequency.

The kernel is compared with this reference on the slot's cases; here is also the proof that those are clear of rounding.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.contract import NumericsKind
from sgl_mega_slots.common.case_tools import generator
from sgl_mega_slots.common.murmur import murmur3_32
from sgl_mega_slots.verify_accept.blockwise_rejection import cases as slot_cases
from sgl_mega_slots.verify_accept.blockwise_rejection.cases import P, Q, arguments
from sgl_mega_slots.verify_accept.blockwise_rejection.reference import (
    accept_coins,
    decide,
    draft_law,
    gumbel_noise,
    kept_logits,
    log_law,
    sampled_accept,
    simulated_scores,
)
from sgl_mega_slots.verify_accept.blockwise_rejection.spec import BLOCKWISE_REJECTION

_INF, _NAN = float("inf"), float("nan")
_DRAWS, _SIGMAS = 20_000, 5.0
R = (0.1, 0.2, 0.3, 0.4)
#: The widest noise that a 32-bit uniform gives: 23 at one id and -2.9 at the others.
TO = [[23.0 if token == winner else -2.9 for token in range(4)] for winner in range(4)]


# Values of the reference implementation, seed 0, for bytes without a tail.
@pytest.mark.parametrize(
    ("words", "value"),
    [((0,), 0x2362F9DE), ((0xFFFFFFFF,), 0x76293B50), ((0x87654321,), 0xF55B516B), ((0, 0), 0x63852AFC)],
)
def test_murmur_known_answers(words: tuple[int, ...], value: int) -> None:
    assert hex(int(murmur3_32(*(torch.tensor(word) for word in words)))) == hex(value)


def _logits(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows).log()


def _decide(
    drafts: list[int],
    p: Tensor,
    q: Tensor | None,
    coins: list[float],
    noise: list[float],
    *,
    verify: int | None = None,
    temperature: float = 1.0,
    draft_temperature: float = 1.0,
) -> tuple[int, int]:
    correct, bonus = decide(
        candidates=torch.tensor([[0, *drafts]]),
        target_logits=p[None],
        draft_logits=None if q is None else q[None],
        target_temperatures=torch.tensor([temperature]),
        draft_temperatures=torch.tensor([draft_temperature]),
        verify_lens=torch.tensor([len(drafts) + 1 if verify is None else verify]),
        coins=torch.tensor([coins]),
        noise=torch.tensor([noise]),
    )
    return int(correct), int(bonus)


@pytest.mark.parametrize("coin", [2.0**-31, 0.2, 0.3999, 0.4001, 0.5, 1 - 2.0**-24])
@pytest.mark.parametrize("winner", range(4))
def test_the_coin_decides_and_only_id_0_is_left(coin: float, winner: int) -> None:
    found = _decide([2], _logits(P, P), _logits(Q), [coin], TO[winner])
    assert found == ((1, winner if P[winner] else 0) if coin < 0.4 else (0, 0))


@pytest.mark.parametrize("refused", range(4))
@pytest.mark.parametrize("winner", range(4))
def test_a_rejection_at_every_place(refused: int, winner: int) -> None:
    """Before it all stand, behind it nothing is looked at, and the residual is that row's."""
    coins = [0.39] * refused + [0.41] + [0.01] * 3
    found = _decide([2, 2, 2], _logits(P, P, P, R), _logits(Q, Q, Q), coins[:3], TO[winner])
    assert found == ((refused, 0) if refused < 3 else (3, winner))


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 9.0])
@pytest.mark.parametrize("token", range(3))
def test_equal_laws_accept_every_coin(temperature: float, token: int) -> None:
    p = _logits(P, R, P, R)
    largest = [1 - 2.0**-24] * 3
    found = _decide([token] * 3, p, p[:3], largest, TO[1], temperature=temperature, draft_temperature=temperature)
    assert found == (3, 1)


@pytest.mark.parametrize("with_logits", [False, True], ids=["no-logits", "draft-temperature-0"])
@pytest.mark.parametrize("winner", range(4))
def test_argmax_drafts_are_certain_of_themselves(winner: int, with_logits: bool) -> None:
    q = _logits(Q) if with_logits else None
    assert _decide([0], _logits(P, P), q, [0.49], TO[winner], draft_temperature=0.0) == (1, winner if winner < 3 else 0)
    # Refused: p without id 0, so id 1 or 2.
    want = {0: 1, 1: 1, 2: 2, 3: 1}[winner]
    assert _decide([0], _logits(P, P), q, [0.51], TO[winner], draft_temperature=0.0) == (0, want)


@pytest.mark.parametrize("verify", [1, 2])
@pytest.mark.parametrize(("coin", "last"), [(0.39, 2), (0.41, 0)])
def test_a_cut_block_tests_the_draft_of_its_last_row(verify: int, coin: float, last: int) -> None:
    coins = [0.01] * (verify - 1) + [coin, 0.01, 0.01]
    found = _decide([2, 2, 2], _logits(P, P, P, P), _logits(Q, Q, Q), coins[:3], TO[1], verify=verify)
    assert found == (verify - 1, last)


@pytest.mark.parametrize("token", [-1, 4, 0x7FFFFFFF, 1 << 45, 3], ids=["minus1", "V", "int32", "huge", "no-q"])
def test_a_draft_that_q_does_not_have_leaves_p(token: int) -> None:
    """Id 1 is not in max(p - q, 0) but in p. Id 3 is in range, with neither p nor q."""
    assert _decide([token, 2], _logits(P, P, P), _logits(Q, Q), [2.0**-31] * 2, TO[1]) == (0, 1)


def test_a_refusal_with_nothing_left_takes_p() -> None:
    """A coin of 1, which there is not, refuses equal laws as rounding may."""
    p = _logits(P, R)
    assert [_decide([1], p, p[:1], [1.0], noise) for noise in TO] == [(0, 0), (0, 1), (0, 2), (0, 0)]


@pytest.mark.parametrize(
    ("row", "winner"),
    [
        ([_NAN] * 5, 0),
        ([-_INF] * 5, 0),
        ([-_INF, -_INF, -_INF, -9.0, -_INF], 3),
        ([_NAN, _NAN, _NAN, 1.0, _NAN], 3),
        ([_NAN, 4.0, 3.0, _INF, -_INF], 3),
    ],
    ids=["nan", "minus_inf", "one_finite", "one_finite_among_nan", "infinity"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_dead_target_rows(row: list[float], winner: int, temperature: float) -> None:
    """At the row of a draft, and at the bonus row: the only id that has mass, id 0 where none has."""
    odd, other = torch.tensor(row), torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0])
    for noise in ([0.0] * 5, [5.0, 4.0, 3.0, 2.0, 1.0]):
        refused = _decide([1], torch.stack([odd, other]), None, [2.0**-31], noise, temperature=temperature)
        assert refused == (0, winner)
        bonus = _decide([2], torch.stack([other, odd]), None, [2.0**-31], noise, temperature=temperature)
        assert bonus == (1, winner)


def _run(values: dict[str, Any]) -> dict[str, list[Any]]:
    sampled_accept(**values)
    return {name[4:]: value.tolist() for name, value in values.items() if name.startswith("out_")}


def test_bookkeeping_and_padding() -> None:
    """Graph for four, two live: those equal a run of two, and the rest is as on padding rows of greedy_accept."""
    target, draft, candidates = slot_cases.block(4, 4, 20, [0.9, 0.0, 0.7, 1.1], 3)
    two = _run(arguments(target[:8], draft[:2], candidates[:2], [0.9, 0.0], verify_lens=[4, 2]))
    target[8:], draft[2:], candidates[2:] = _NAN, _NAN, 0x7FFFFFFF
    four = _run(arguments(target, draft, candidates, [0.9, 0.0, 0.7, 1.1], verify_lens=[4, 2, 0, 0]))
    for name, values in two.items():
        assert four[name][:2] == values, name
    assert [four[name][2:] for name in ("correct_lens", "bonus_tokens", "commit_lens")] == [[0, 0]] * 3
    assert four["new_seq_lens"][2:] == [19, 26]
    assert four["tokens"][2:] == [[0] * 4] * 2
    for row in range(2):
        correct = two["correct_lens"][row]
        want = [*candidates[row, 1 : 1 + correct].tolist(), two["bonus_tokens"][row]]
        assert two["tokens"][row] == want + [0] * (3 - correct)
        assert two["commit_lens"][row] == correct + 1 == two["new_seq_lens"][row] - (7 * row + 5)


def test_offsets_and_rows_draw_apart_and_again_the_same() -> None:
    flat, drafts = torch.zeros(4 * 3, 64), torch.tensor([[0, 64, 64]] * 4)
    found = [_run(arguments(flat, None, drafts, [1.0] * 4, noise_offset=o))["bonus_tokens"] for o in (0, 1, 2, 0)]
    assert found[0] == found[3]
    assert len({str(row) for row in found}) == 3
    assert len({token for row in found[:3] for token in row}) > 8, "rows with equal logits draw alike"


def test_numbers_are_functions_of_key_offset_row_and_id() -> None:
    offset = torch.tensor([9])
    coins, noise = accept_coins(5, 4, -3, offset), gumbel_noise(5, 30, -3, offset)
    assert torch.equal(coins[:2], accept_coins(2, 4, (1 << 64) - 3, offset))
    assert torch.equal(noise[:2, :7], gumbel_noise(2, 7, -3, offset))
    assert len(coins.unique()) == 15
    assert len(noise.unique()) == 150
    assert coins.min().item() > 0
    assert coins.max().item() <= 1 - 2.0**-24


def _drawn_from(laws: Tensor, seed: int) -> Tensor:
    """Candidates [DRAWS, T] whose drafts have these laws [G, V]."""
    source = generator(seed)
    picks = [torch.multinomial(law, _DRAWS, replacement=True, generator=source) for law in laws]
    return torch.stack([torch.zeros(_DRAWS, dtype=torch.int64), *picks], dim=1)


def _assert_law(tokens: Tensor, law: tuple[float, ...], what: str) -> None:
    count = len(tokens)
    for token, probability in enumerate(law):
        frequency = (tokens == token).double().mean().item()
        bound = _SIGMAS * math.sqrt(probability * (1 - probability) / count)
        assert abs(frequency - probability) <= bound, f"{what}, id {token}: {frequency}, {probability} +- {bound}"


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["kept", "one_hot", "narrow", "cut", "broken"])
def test_twenty_thousand_blocks_have_the_targets_law(kind: str, temperature: float) -> None:
    """At every place, of those blocks that reach it; each place has refused drafts and, but the last, standing ones."""
    laws, drafted = (P, R, P, R), torch.tensor([Q, P, R])
    verify = 3 if kind == "cut" else 4
    if kind == "one_hot":  # any drafts that do not look at the target's draw
        drafted = torch.tensor([[0.4, 0.3, 0.3, 0.0]] * 3)
    if kind == "narrow":
        drafted = torch.tensor([(0.2, 0.8), (0.5, 0.5), (0.9, 0.1)])
    candidates = _drawn_from(drafted, 7)
    if kind == "broken":  # now and then an id that q cannot give, whatever the target is
        candidates[::5, 2] = 4
    target = (_logits(*laws) * temperature).repeat(_DRAWS, 1)
    draft = None if kind == "one_hot" else (drafted.log() * temperature).expand(_DRAWS, -1, -1)
    values = arguments(target, draft, candidates, [temperature] * _DRAWS, verify_lens=[verify] * _DRAWS, noise_offset=5)
    sampled_accept(**values)
    correct, tokens = values["out_correct_lens"], values["out_tokens"]
    assert correct.unique().tolist() == list(range(verify))
    for place in range(verify):
        _assert_law(tokens[correct >= place, place], laws[place], f"place {place}")


def test_greedy_rows_among_sampled_ones_accept_as_alone() -> None:
    temperatures = [0.0, 0.8] * 6
    target, draft, candidates = slot_cases.block(12, 4, 33, temperatures, 1)
    candidates[::2, 1:] = target.view(12, 4, 33)[::2, :-1].argmax(-1)
    candidates[::4, 2] = 40
    draft[::2] = _NAN  # a greedy row's draft logits are whatever lies there
    found = _run(arguments(target, draft, candidates, temperatures))
    winners = target.view(12, 4, 33).argmax(-1)
    for row in range(0, 12, 2):
        correct = 1 if row % 4 == 0 else 3
        assert (found["correct_lens"][row], found["bonus_tokens"][row]) == (correct, int(winners[row, correct]))


def _error(values: Tensor) -> Tensor:
    """What the slot's numerics allow of log-probabilities; -inf is exact."""
    return 2.0**-16 * torch.where(values > -_INF, values, 0).abs().clamp(min=1)


def _unclear_bonus(values: dict[str, Any], logits: Tensor) -> list[str]:
    """Sampled rows in which the simulated bonus leads by less than fp32 rounds scores of their size."""
    sampled_accept(**values)
    unclear = []
    each = torch.arange(len(logits))
    law = logits[each, values["out_correct_lens"].long()].double()
    scores = simulated_scores(law, values["target_temperatures"], values["simulated_seed"])
    for row in range(len(logits)):
        if values["verify_lens"][row] > 0 and values["target_temperatures"][row] > 0:
            first, second = scores[row].topk(2).values.tolist()
            if first - second <= 2.0**-20 * max(1.0, abs(first)):
                unclear.append(f"row {row}: the bonus leads the draw by {first - second:g}")
    return unclear


def _unclear(values: dict[str, Any]) -> list[str]:
    """Where rounding within the slot's numerics could turn a decision of the reference, in words."""
    batch, rows = values["candidates"].shape
    vocab = values["target_logits"].shape[-1]
    logits = kept_logits(
        values["target_logits"].view(batch, rows, vocab), values["target_temperatures"], values["target_cutoffs"]
    )
    if values["simulated_correct"] is not None:
        return _unclear_bonus(values, logits)
    log_p = log_law(logits, values["target_temperatures"])
    log_q = draft_law(values["candidates"], values["draft_logits"], values["draft_temperatures"], vocab)
    coins = accept_coins(batch, rows, values["noise_key"], values["noise_offset"]).double()
    noise = gumbel_noise(batch, vocab, values["noise_key"], values["noise_offset"])
    sampled_accept(**values)
    unclear = []
    for row in range(batch):
        verify, correct = int(values["verify_lens"][row]), int(values["out_correct_lens"][row])
        if verify == 0 or values["target_temperatures"][row] <= 0:
            continue
        refused_at = None
        for place in range(min(correct + 1, rows - 1)):
            draft = int(values["candidates"][row, place + 1])
            if not 0 <= draft < vocab or log_q[row, place, draft] < -80:
                break
            p, q = log_p[row, place, draft], log_q[row, place, draft]
            lead = coins[row, place].log() - (p - q)
            if p != q and abs(lead) <= _error(p) + _error(q) + 2.0**-20:
                unclear.append(f"row {row}, place {place}: the coin is {lead:g} from p / q")
            refused_at = place if lead >= 0 else None
        law, q = log_p[row, correct], torch.full((vocab,), -_INF, dtype=torch.float64)
        if refused_at is not None:
            q = log_q[row, refused_at]
        if correct == verify - 1 < rows - 1 and refused_at is None:
            continue  # the bonus is a draft
        law_or_0 = torch.where(law > -_INF, law, 0)
        up, down = _error(law), _error(q)
        gone = (q > law + up + down) | (law == -_INF)
        high = torch.where(gone, -_INF, law + up + torch.log1p(-torch.exp((q - law_or_0 - up - down).clamp(max=-1e-9))))
        close = (q >= law - up - down) | (law == -_INF)
        low = torch.where(close, -_INF, law - up + torch.log1p(-torch.exp((q - law_or_0 + up + down).clamp(max=-1e-9))))
        # The noise itself: five roundings of a number below 23.
        error = 5 * 2.0**-24 * 23
        winner = int(values["out_bonus_tokens"][row])
        others = torch.where(law > -_INF, high + noise[row] + error, -_INF)
        others[winner] = -_INF
        lead = low[winner] + noise[row, winner] - error - others.max()
        alone = bool((others == -_INF).all())
        if not alone and not lead > 0:
            unclear.append(f"row {row}: id {winner} leads the draw by {lead:g}")
    return unclear


@pytest.mark.slow
def test_the_cases_are_clear_of_rounding() -> None:
    assert BLOCKWISE_REJECTION.numerics.kind is NumericsKind.IN_LAW
    looked_at = 0
    for case in slot_cases.cases():
        values = case.make("cpu")
        assert not (lines := _unclear(values)), f"{case.id}: {lines}"
        looked_at += int((values["target_temperatures"] > 0).sum())
    assert looked_at > 150


def test_an_unclear_case_is_seen() -> None:
    """One coin set on p / q, one draw of equal scores."""
    values = arguments(_logits(P, P), _logits(Q)[None], torch.tensor([[0, 2]]), [1.0])
    coin = accept_coins(1, 2, values["noise_key"], values["noise_offset"]).item()
    p = torch.tensor([0.5, 0.5 - 0.5 * coin, 0.5 * coin, 0.0])
    values["target_logits"] = torch.stack([p, p]).log()
    assert any("the coin is" in line for line in _unclear(values))
    noise = gumbel_noise(1, 4, values["noise_key"], values["noise_offset"])
    tie = torch.where(torch.arange(4) < 2, -noise, -_INF).float()
    values = arguments(tie.expand(2, -1).contiguous(), None, torch.tensor([[0, 9]]), [1.0])
    assert any("leads the draw by" in line for line in _unclear(values))
