"""The LM head's slots beyond their cases: wrong arguments, both ways to fetch a weight, sizes, rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.common.case_tools import generator
from sgl_mega_slots.common.lm_head import launch as head
from sgl_mega_slots.common.lm_head.case_rows import exact, exact_weight, planted
from sgl_mega_slots.common.lm_head.reference import head_logits
from sgl_mega_slots.draft.draft_lm_head import cases as draft_cases
from sgl_mega_slots.draft.draft_lm_head.launch import DraftLmHead
from sgl_mega_slots.draft.draft_lm_head.reference import draft_logits
from sgl_mega_slots.target.target_argmax_head import cases as target_cases
from sgl_mega_slots.target.target_argmax_head.launch import TargetArgmaxHead
from sgl_mega_slots.target.target_argmax_head.reference import target_argmax

VOCAB, DEPTH = 70, 24
Edit = Callable[[dict[str, Any]], None]


def _setup(batch: int = 2, gamma: int = 3, vocab: int = VOCAB) -> SlotSetup:
    return SlotSetup(backend=Backend.INTERPRETER, device="cpu", max_batch=batch, gamma=gamma, vocab_size=vocab)


def _draft(batch: int = 2, gamma: int = 3, **kwargs: Any) -> dict[str, Any]:
    rows = exact((batch * gamma, DEPTH), 2, torch.bfloat16, 1).view(batch, gamma, DEPTH)
    return draft_cases.arguments(rows, exact_weight(VOCAB, DEPTH, torch.bfloat16, 2), gamma, **kwargs)


def _target(verify_lens: list[int], rows: int = 4) -> dict[str, Any]:
    hidden = exact((len(verify_lens) * rows, DEPTH), 2, torch.bfloat16, 1)
    return target_cases.arguments(hidden, exact_weight(VOCAB, DEPTH, torch.bfloat16, 2), verify_lens)


def _put(name: str, change: Callable[[Any], Any]) -> Edit:
    def edit(values: dict[str, Any]) -> None:
        values[name] = change(values[name])

    return edit


def _no_output(values: dict[str, Any]) -> None:
    values["out_logits"] = values["out_tokens"] = None


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_put("hidden", lambda t: t[0]), r"hidden: shape \(3, 24\); must be \[B, Q, H\], Q the G 3"),
        (_put("hidden", lambda t: t[:, :2]), r"hidden: shape \(2, 2, 24\)"),
        (_put("hidden", lambda t: t.repeat(2, 1, 1)), "hidden: B 4; must be 1 to 2"),
        (_put("hidden", lambda t: t.double()), "hidden: dtype torch.float64"),
        (
            _put("lm_head_weight", lambda t: t[:69]),
            r"lm_head_weight: shape \(69, 24\); must be \[W, H\], W at least V, 70",
        ),
        (_put("lm_head_weight", lambda t: t[:, :16]), r"lm_head_weight: shape \(70, 16\); must be \(70, 24\)"),
        (_put("lm_head_weight", lambda t: t.T.contiguous().T), "lm_head_weight: last axis has stride 70"),
        (_put("vocab_size", lambda n: 69), "vocab_size: V 69; the slot was built with V 70"),
        (_put("divisor", lambda n: 0.0), r"divisor: 0.0; must be 2\*\*-126 to 2\*\*126"),
        (_put("divisor", lambda n: -1.0), "divisor: -1.0"),
        (_put("divisor", lambda n: math.nan), "divisor: nan"),
        (_put("out_logits", lambda t: t.float()), "out_logits: dtype torch.float32; must be one of torch.bfloat16"),
        (_put("out_tokens", lambda t: t[:, :2]), r"out_tokens: shape \(2, 2\); must be \(2, 3\)"),
        (_no_output, "out_logits, out_tokens: both None"),
    ],
)
def test_wrong_arguments_of_the_draft(edit: Edit, message: str) -> None:
    values = _draft()
    edit(values)
    with pytest.raises(ValueError, match=message):
        DraftLmHead(_setup())(**values)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_put("hidden", lambda t: t[:7]), r"hidden: shape \(7, 24\); must be \[B \* T, H\], B \* T = 8"),
        (_put("out_tokens", lambda t: t[:, :3]), "out_tokens: T 3; the slot was built with T 4"),
        (_put("verify_lens", lambda t: t.long()), "verify_lens: dtype torch.int64"),
        (_put("verify_lens", lambda t: t[:1]), r"verify_lens: shape \(1,\); must be \(2,\)"),
        (_put("vocab_size", lambda n: 71), "vocab_size: V 71; the slot was built with V 70"),
    ],
)
def test_wrong_arguments_of_the_target(edit: Edit, message: str) -> None:
    values = _target([4, 4])
    edit(values)
    with pytest.raises(ValueError, match=message):
        TargetArgmaxHead(_setup())(**values)


def _misaligned(tensor: Tensor) -> Tensor:
    """The same values two bytes further on."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("change", [None, _misaligned], ids=["aligned", "misaligned"])
def test_both_ways_to_fetch_the_weight_give_the_same(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor] | None
) -> None:
    described = []
    made = head._descriptor

    def seen(*args: Any) -> Any:
        described.append(made(*args))
        return described[-1]

    monkeypatch.setattr(head, "_descriptor", seen)
    values, expected = _draft(), _draft()
    if change is not None:
        values["lm_head_weight"] = change(values["lm_head_weight"])
    DraftLmHead(_setup())(**values)
    draft_logits(**expected)
    assert [one is not None for one in described] == [change is None]
    assert torch.equal(values["out_logits"], expected["out_logits"])
    assert values["out_tokens"].tolist() == expected["out_tokens"].tolist()


def test_a_larger_setup_serves_a_smaller_batch() -> None:
    values, expected = _draft(batch=2), _draft(batch=2)
    DraftLmHead(_setup(batch=9))(**values)
    draft_logits(**expected)
    assert torch.equal(values["out_logits"], expected["out_logits"])
    assert values["out_tokens"].tolist() == expected["out_tokens"].tolist()


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """Also where it lies in another block of rows: 1 row alone, 24 rows in two blocks of 16."""
    many, alone = _draft(batch=8), _draft(batch=8)
    DraftLmHead(_setup(batch=8))(**many)
    alone["hidden"] = alone["hidden"][7:].clone()
    alone["out_logits"], alone["out_tokens"] = alone["out_logits"][:1].clone(), alone["out_tokens"][:1].clone()
    DraftLmHead(_setup(batch=8))(**alone)
    assert torch.equal(many["out_logits"][7], alone["out_logits"][0])
    assert many["out_tokens"][7].tolist() == alone["out_tokens"][0].tolist()


def test_a_block_that_nobody_wants_writes_no_winner() -> None:
    """Requests 4 to 7 are padding, rows 16 to 31: what the last call left of them must not come back."""
    slot = TargetArgmaxHead(_setup(batch=8))
    full, half, expected = _target([4] * 8), _target([4] * 4 + [0] * 4), _target([4] * 4 + [0] * 4)
    slot(**full)
    assert bool(full["out_tokens"][4:].any())
    slot._head._values.fill_(float("nan"))
    slot(**half)
    target_argmax(**expected)
    assert half["out_tokens"].tolist() == expected["out_tokens"].tolist()
    assert half["out_tokens"][4:].tolist() == [[0] * 4] * 4
    # One program for each of two blocks: the winners of rows 0 to 15 were written, those of 16 to 31 were not.
    assert slot._head._values[:32].isnan().tolist() == [False] * 16 + [True] * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_planted_winners_lead_by_more_than_rounding(dtype: torch.dtype) -> None:
    """What the slots' numerics promise of tokens is tested on cases in which the winner is clear."""
    for rows, vocab, depth in ((3, 97, 96), (63, 8_193, 4096)):
        hidden, weight = planted(rows, vocab, depth, dtype)
        best, ids = head_logits(hidden, weight, 1.0, vocab).float().topk(2, dim=-1)
        assert ids[:, 0].tolist() == ((31 * torch.arange(rows) + 3) % vocab).tolist()
        lead, bound = best[:, 0] - best[:, 1], 2.0**-7 * best[:, 0].abs()
        assert bool((lead > 2 * bound).all()), f"H {depth}: least lead {lead.min()}, twice the bound {2 * bound.max()}"


def test_fp32_logits_differ_by_the_order_of_the_sum_alone() -> None:
    source, depth = generator(7), 96
    hidden, weight = torch.randn(2, 3, depth, generator=source), torch.randn(VOCAB, depth, generator=source)
    values = draft_cases.arguments(hidden, weight, 3)
    DraftLmHead(_setup())(**values)
    wanted = hidden.double() @ weight.double().T
    # Each of H products and sums rounds once: at most H + 1 units of 2**-24 of the sum of magnitudes.
    bound = (depth + 1) * 2.0**-24 * (hidden.abs() @ weight.abs().T)
    error = (values["out_logits"].double() - wanted).abs()
    worst = (error / bound).argmax()
    assert bool((error <= bound).all()), f"element {worst}: error {error.flatten()[worst]}, {bound.flatten()[worst]}"
