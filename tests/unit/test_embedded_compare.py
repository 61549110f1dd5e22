"""The report of ``sgl-mega run``: three runs, whether they agree, and where not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from embedded_tiny import PROVIDED, slots_plan, tiny_models

from sgl_mega_plugin.contract import SEAMS
from sgl_mega_plugin.embedded import Request, RequestError, compare_runs, stages

MODELS = tiny_models()


def requests(**fields: Any) -> list[Request]:
    return [Request(text=text, max_new_tokens=14, ignore_eos=True, **fields) for text in ("bad", "cafe", "h")]


def test_greedy_runs_agree() -> None:
    heard: dict[str, list[int]] = {}

    def listen(name: str) -> Any:
        heard[name] = []
        return lambda index, tokens: heard[name].extend(tokens)

    report = compare_runs(MODELS, requests(), plan=slots_plan(), on_run=listen)
    assert report.identical
    assert report.differences == ()
    assert list(report.runs) == ["plain", "speculative", "slots"]
    assert (report.model, report.device, report.dtype) == ("tiny", "cpu", "float32")
    default = {entry.slot.seam: entry.slot.name for entry in PROVIDED if entry.slot.default}
    assert [(slot.seam, slot.name) for slot in report.slots] == [
        (seam, default[seam]) for seam in SEAMS if seam in default
    ]
    assert report.idle == {}
    assert {slot.backend for slot in report.slots} == {"reference"}
    assert report.runs["plain"].tokens == report.runs["slots"].tokens
    assert report.runs["plain"].accept_length == 1.0
    assert report.accept_length == report.runs["slots"].accept_length
    for name, run in report.runs.items():
        assert len(heard[name]) == sum(map(len, run.tokens)) == 42
        assert run.tokens_per_s == pytest.approx(42 / run.seconds)
        assert [len(text) for text in run.text] == [14, 14, 14]


def test_all_slots_together_agree_with_plain_output() -> None:
    report = compare_runs(MODELS, requests(), plan=slots_plan("all"))
    assert report.identical
    assert set(report.idle) == {"context_kv"}
    assert report.runs["slots"].tokens == report.runs["plain"].tokens


def test_the_report_is_json() -> None:
    report = compare_runs(MODELS, requests()[:1], plan=slots_plan())
    found = json.loads(report.model_dump_json())
    assert {"model", "device", "runs", "identical", "accept_length", "slots"} <= found.keys()
    assert found["runs"]["slots"]["tokens"] == [list(report.runs["plain"].tokens[0])]


def test_sampled_runs_agree_between_slots_on_and_off() -> None:
    report = compare_runs(MODELS, requests(temperature=0.8), plan=slots_plan())
    assert report.identical
    assert report.runs["plain"].tokens != report.runs["speculative"].tokens


def test_a_difference_is_shown_with_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accept stage that calls every fourth block's bonus 5: the engine's own run is the wrong one."""
    right, calls = stages.greedy_accept, 0

    def wrong(**arguments: Any) -> None:
        nonlocal calls
        right(**arguments)
        calls += 1
        if calls % 4 == 0:
            rows = torch.arange(len(arguments["out_tokens"]))
            arguments["out_bonus_tokens"].fill_(5)
            arguments["out_tokens"][rows, arguments["out_correct_lens"].long()] = 5

    monkeypatch.setattr(stages, "greedy_accept", wrong)
    report = compare_runs(MODELS, requests()[:1], plan=slots_plan())
    assert not report.identical
    assert [difference.runs for difference in report.differences] == [
        ("plain", "speculative"),
        ("speculative", "slots"),
    ]
    first = report.differences[0]
    plain, speculative = report.runs["plain"].tokens[0], report.runs["speculative"].tokens[0]
    assert plain[: first.position] == speculative[: first.position]
    assert first.tokens == (plain[first.position], speculative[first.position])
    assert first.tokens[1] == 5
    assert first.logit_margin > 0


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="no requests to compare"):
        compare_runs(MODELS, [], plan=slots_plan())
    with pytest.raises(RequestError, match=r"request 1: .* does not fit"):
        compare_runs(MODELS, [*requests()[:1], Request(text="a", max_new_tokens=65)], plan=slots_plan())


def test_a_plan_for_elsewhere_is_found_before_anything_runs() -> None:
    started: list[str] = []
    with pytest.raises(ValueError, match="a plan for runtime 'sglang'"):
        compare_runs(MODELS, requests(), plan=slots_plan(runtime="sglang"), on_run=lambda name: started.append(name))
    assert started == []
