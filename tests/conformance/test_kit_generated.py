"""Generated cases and frequency tests of the kit: repeatable, inside the seam, and right about right and wrong laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.conformance.arguments import tensors
from sgl_mega_plugin.conformance.generate import generated_cases
from sgl_mega_plugin.conformance.laws import LAWS
from sgl_mega_plugin.conformance.laws.tally import DRAWS as TOKENS
from sgl_mega_plugin.conformance.laws.tally import Tally
from sgl_mega_plugin.conformance.runner import Target, conform, run_case
from sgl_mega_plugin.conformance.seam_kits import SEAM_KITS
from sgl_mega_plugin.conformance.seam_kits.draw import Draw
from sgl_mega_plugin.contract import SEAMS, Backend, Case, Provided, Requirements, Slot
from sgl_mega_plugin.registry import Registry
from sgl_mega_slots import SLOTS
from sgl_mega_slots.draft.markov.reference import draft_block

Reference = Callable[..., None]
_BY_SEAM = {slot.seam: Provided(slot=slot, distribution="sgl-mega-plugin", version="0") for slot in SLOTS}


def _cases(seam: str, count: int, seed: int = 0) -> list[Case]:
    target = Target.load(_BY_SEAM[seam], device="cpu", backend=Backend.REFERENCE)
    return list(
        generated_cases(
            seam, count=count, seed=seed, requires=Requirements(), reference=target.reference, on_cuda=False
        )
    )


def test_every_seam_has_a_slot_and_a_generator() -> None:
    assert set(SEAM_KITS) == set(SEAMS) == set(_BY_SEAM)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Without NaN, in a dtype that has the operators."""
    return (values.float() if values.is_floating_point() else values).nan_to_num(7)


@pytest.mark.parametrize("seam", SEAMS)
def test_a_case_depends_on_its_seed_and_number_alone(seam: str) -> None:
    few, many = _cases(seam, 2, seed=5), _cases(seam, 4, seed=5)
    assert [case.id for case in few] == [case.id for case in many[:2]]
    assert few[1].id.startswith("generated-1 (seed 5: layout ")
    for (label, one), (_, other) in zip(tensors(few[1].make("cpu")), tensors(many[1].make("cpu")), strict=True):
        first, second = (_numbers(each) for each in (one, other))
        assert torch.equal(first, second), label
        assert one.stride() == other.stride()
    assert [case.id for case in few] != [case.id for case in _cases(seam, 2, seed=6)]


def test_a_target_is_drawn_with_every_kind_of_weights() -> None:
    kinds = set()
    for case in _cases("target_forward", 20):
        made = case.make("cpu")
        scales = made["down_scales"]
        kinds.add((made["down_weights"][0].dtype, scales if scales is None else scales[0].dim()))
    assert kinds == {(torch.bfloat16, None), (torch.float8_e4m3fn, 1), (torch.float8_e4m3fn, 2)}


@pytest.mark.parametrize("seam", SEAMS)
def test_references_pass_generated_cases(seam: str) -> None:
    target = Target.load(_BY_SEAM[seam], device="cpu", backend=Backend.REFERENCE)
    for case in _cases(seam, 60, seed=1):
        result = run_case(target, case)
        assert result.ok, result.text


def test_generated_cases_cover_what_is_odd() -> None:
    """Over 200 draws of the accept seam: accepted and refused blocks, padding, dead rows, ids out of range, strides."""
    seen = {"stands": 0, "falls": 0, "padding": 0, "dead row": 0, "id out of range": 0, "strided": 0, "int32": 0}
    seen |= {"simulated": 0, "argmax given": 0}
    target = Target.load(_BY_SEAM["greedy_accept"], device="cpu", backend=Backend.REFERENCE)
    for case in _cases("greedy_accept", 200):
        values = case.make("cpu")
        target.reference(**values)
        seen["int32"] += values["seq_lens"].dtype is torch.int32
        seen["simulated"] += values["simulated_correct"] is not None
        if values["simulated_correct"] is not None or values["target_logits"] is None:
            seen["argmax given"] += values["target_logits"] is None
            continue
        drafted = (values["verify_lens"] - 1).clamp(min=0)
        seen["stands"] += bool(((values["out_correct_lens"] == drafted) & (drafted > 0)).any())
        seen["falls"] += bool((values["out_correct_lens"] < drafted).any())
        seen["padding"] += bool((values["verify_lens"] == 0).any())
        logits = values["target_logits"]
        seen["dead row"] += bool((logits.isnan() | (logits == -torch.inf)).all(-1).any())
        seen["id out of range"] += bool((values["candidates"] >= logits.shape[-1]).any())
        seen["strided"] += logits.stride(0) > logits.shape[1]
    assert min(seen.values()) >= 20, seen


def test_a_slots_limits_hold_for_generated_cases() -> None:
    for number in range(20):
        draw = Draw(str(number), requires=Requirements(dtypes=frozenset({"float16"}), max_batch=2), large=True)
        values, _ = SEAM_KITS["draft_block"].draw(draw)
        assert len(values["base_logits"]) <= 2
        assert values["base_logits"].dtype is values["markov_w1"].dtype is torch.float16


def _failing(**arguments: Any) -> None:
    raise ValueError("no reference")


def _unsteady(**arguments: Any) -> None:
    arguments["out_draft_tokens"].copy_(torch.randint_like(arguments["out_draft_tokens"], 1 << 30))


def test_a_reference_that_fails_or_throws_dice() -> None:
    options: dict[str, Any] = {"count": 1, "seed": 0, "requires": Requirements(), "on_cuda": False}
    (case,) = generated_cases("draft_block", reference=_failing, **options)
    assert case.make("cpu")["base_logits"].dim() == 3
    with pytest.raises(RuntimeError, match="the same noise has to give the same choice"):
        list(generated_cases("draft_block", reference=_unsteady, **options))


def unsteady_draft(
    *,
    base_logits: Tensor,
    anchor_tokens: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    draft_hidden: Tensor | None,
    mixer_weight: Tensor | None,
    mixer_bias: Tensor | None,
    temperatures: Tensor,
    noise_key: int,
    noise_offset: Tensor,
    out_draft_tokens: Tensor,
    out_step_logits: Tensor | None,
    out_features: Tensor | None,
) -> None:
    out_draft_tokens.random_(1 << 30)


def test_dice_in_a_reference_are_a_failed_case() -> None:
    markov = _BY_SEAM["draft_block"]
    slot = markov.slot.model_copy(update={"reference": f"{__name__}:unsteady_draft"})
    registry = Registry.of([markov.model_copy(update={"slot": slot})])
    (result,) = conform(registry, backend=Backend.REFERENCE, generated=1).slots
    [text] = [failure.text for failure in result.failures if failure.case == "(generated)"]
    assert "the same noise has to give the same choice" in text


def _forgets_offset(**arguments: Any) -> None:
    draft_block(**arguments | {"noise_offset": torch.zeros(1, dtype=torch.int64)})


def _rows_draw_alike(**arguments: Any) -> None:
    """Every row draws what the first of its temperature draws."""
    tokens = arguments["out_draft_tokens"]
    few = {name: arguments[name][:3] for name in ("base_logits", "anchor_tokens", "temperatures", "out_draft_tokens")}
    draft_block(**arguments | few)
    tokens.copy_(tokens[:3].repeat(len(tokens) // 3, 1))


def _forgets_bias(**arguments: Any) -> None:
    draft_block(**arguments | {"markov_w1": torch.zeros_like(arguments["markov_w1"])})


def _forgets_temperature(**arguments: Any) -> None:
    draft_block(**arguments | {"temperatures": (arguments["temperatures"] > 0).float()})


def _samples_greedy_rows(**arguments: Any) -> None:
    draft_block(**arguments | {"temperatures": arguments["temperatures"].clamp(min=0.2)})


def sampled_accept(*, fault: str = "", **arguments: Any) -> None:
    """The seam's rule with torch's own generator, in fp64; ``fault`` breaks one part of it."""
    numbers = torch.Generator().manual_seed(int(arguments["noise_offset"]) + 1)
    candidates, rows = arguments["candidates"], arguments["candidates"].shape[1]
    vocab = arguments["target_logits"].shape[1]
    for name in ("out_correct_lens", "out_bonus_tokens", "out_commit_lens", "out_tokens"):
        arguments[name].zero_()
    for b, (at, draft_at) in enumerate(
        zip(*(arguments[f"{kind}_temperatures"] for kind in ("target", "draft")), strict=True)
    ):
        for t in range(int(arguments["verify_lens"][b])):
            logits = arguments["target_logits"][b * rows + t]
            if arguments["target_cutoffs"] is not None and fault != "ignores cutoffs":
                logits = torch.where(logits < arguments["target_cutoffs"][b * rows + t], -torch.inf, logits)
            p = _law(logits, float(at))
            last = t + 1 == int(arguments["verify_lens"][b])
            d = int(candidates[b, min(t + 1, rows - 1)])
            q = torch.zeros(vocab, dtype=torch.float64)
            q[d] = 1.0
            if arguments["draft_logits"] is not None and not last and at > 0:
                known = _law(arguments["draft_logits"][b, t], float(draft_at))
                q = torch.nn.functional.pad(known, (0, vocab - len(known)))
            coin = torch.rand((), generator=numbers, dtype=torch.float64)
            stands = not last and bool(coin * (1 if fault == "ignores q" else q[d]) < p[d])
            residual = p if last or fault == "residual is p" else (p - q).clamp(min=0)
            token = d if stands else int(torch.multinomial(residual, 1, generator=numbers))
            arguments["out_tokens"][b, t] = token
            arguments["out_commit_lens"][b] = t + 1
            if not stands or fault == "never accepts":
                break


def _law(logits: Tensor, at: float) -> Tensor:
    if at == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    return (logits.double() / at).softmax(-1)


def _accept_with(fault: str) -> Reference:
    return lambda **arguments: sampled_accept(fault=fault, **arguments)


_RUNS = [
    ("draft_block", "law-v8", draft_block, None),
    ("draft_block", "law-v8", _forgets_offset, "temperature 1.0, id "),
    ("draft_block", "law-v8", _rows_draw_alike, "temperature 1.0, id "),
    ("draft_block", "law-v8", _forgets_bias, "temperature 1.0, id "),
    ("draft_block", "law-v8", _forgets_temperature, "temperature 0.6, id "),
    ("draft_block", "law-v8", _samples_greedy_rows, "temperature 0.0, id "),
    ("sampled_accept", "law-v8-draft-logits", _accept_with(""), None),
    ("sampled_accept", "law-v8-one-hot", _accept_with(""), None),
    ("sampled_accept", "law-v8-cutoffs", _accept_with(""), None),
    ("sampled_accept", "law-v8-cutoffs-one-hot", _accept_with(""), None),
    ("sampled_accept", "law-v8-narrow-draft", _accept_with(""), None),
    ("sampled_accept", "law-v8-cutoffs", _accept_with("ignores cutoffs"), "committed id "),
    ("sampled_accept", "law-v8-draft-logits", _accept_with("residual is p"), "committed id "),
    ("sampled_accept", "law-v8-one-hot", _accept_with("residual is p"), " for draft id "),
    ("sampled_accept", "law-v8-draft-logits", _accept_with("ignores q"), "accepted draft id "),
    ("sampled_accept", "law-v8-draft-logits", _accept_with("never accepts"), "accepted draft id "),
]


@pytest.mark.parametrize(
    ("seam", "law", "call", "says"),
    _RUNS,
    ids=[f"{run[1]}-{run[2].__name__}-{index}" for index, run in enumerate(_RUNS)],
)
def test_a_law_is_told_from_a_wrong_one(seam: str, law: str, call: Reference, says: str | None) -> None:
    (found,) = [entry for entry in LAWS[seam] if entry.id == law]
    problems = found.run(call, found.arguments("cpu"))
    if says is None:
        assert problems == []
    else:
        assert any(says in line and "bound" in line for line in problems), problems


def test_a_law_counts_enough_tokens_and_keeps_to_the_range() -> None:
    for seam, laws in LAWS.items():
        sizes = {law.id.split("-")[1] for law in laws}
        assert sizes == {"v8", "v151936"}, seam
    assert TOKENS >= 20_000
    (law, *_) = LAWS["draft_block"]
    outside = law.run(lambda **values: values["out_draft_tokens"].fill_(8), law.arguments("cpu"))
    assert outside == ["out_draft_tokens at temperature 1.0: found 8, allowed 0 to 7"]
    (law, *_) = LAWS["sampled_accept"]
    outside = law.run(lambda **values: values["out_commit_lens"].fill_(0), law.arguments("cpu"))
    assert outside == ["out_commit_lens[0]: found 0, allowed 1 to 4"]


@pytest.mark.parametrize(
    ("probability", "count", "lines"),
    [
        ([0.5, 0.5], [5200, 4800], []),
        (
            [0.5, 0.5],
            [5251, 4749],
            [f"x, event {i}: frequency {f}, expected 0.50000, bound 0.02500 (5 sigma)"
             for i, f in ((0, "0.52510 of 10000"), (1, "0.47490 of 10000"))],
        ),
        ([1.0, 0.0], [9999, 1], [
            "x, event 0: frequency 0.99990 of 10000, expected 1.00000, bound 0.00000 (5 sigma)",
            "x, event 1: frequency 0.00010 of 10000, expected 0.00000, bound 0.00000 (5 sigma)",
        ]),
        ([0.997] + [0.001] * 3, [9970, 18, 6, 6], []),
        ([0.997] + [0.001] * 3, [9971, 60, 0, 0], ["x, the 3 rarest: found 60 times, expected 30.0, bound 27.4"]),
    ],
    ids=["inside", "outside", "certain", "rare", "too many rare"],
)  # fmt: skip
def test_a_tally(probability: list[float], count: list[int], lines: list[str]) -> None:
    tally = Tally("x", lambda index: f"event {index}", torch.tensor(probability, dtype=torch.float64))
    tally.count += torch.tensor(count)
    tally.trials += 10_000
    assert tally.problems() == lines


def test_a_run_reports_laws_and_generated_cases() -> None:
    slot: Slot = _BY_SEAM["draft_block"].slot
    registry = Registry.of([_BY_SEAM["draft_block"]])
    report = conform(registry, backend=Backend.REFERENCE, names=[slot.name], generated=3, seed=9, law=None)
    ids = [case.case for case in report.slots[0].cases]
    assert report.ok
    assert (report.generated, report.seed) == (3, 9)
    assert [id_.split(" ")[0] for id_ in ids[-4:]] == ["generated-0", "generated-1", "generated-2", "law-v8"]
    assert ids[-1] == "law-v8 (reference)"
    assert not [
        id_ for id_ in (c.case for c in conform(registry, backend=Backend.REFERENCE).slots[0].cases) if "law" in id_
    ]
