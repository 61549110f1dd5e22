"""``sgl-mega bench``: its list, its answers, its files and its errors. Nothing here is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bench_made import peer_entry, report, result, slot_entry
from cli_tools import answer, invoke, program, use_clean_environment

from sgl_mega_plugin.bench import files, plots, runner
from sgl_mega_plugin.bench.records import QUICK, Entry, Report, Role, Settings
from sgl_mega_plugin.cli import bench as cli_bench

_FAILED = Entry(name="accept_tail", role=Role.SLOT, summary="ours", reason="fails")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    use_clean_environment(monkeypatch)


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """A machine with a GPU on which a run takes no time; the settings of each run."""
    seen: list[Settings] = []

    def made(registry: Any, settings: Settings, **kwargs: Any) -> Report:
        seen.append(settings)
        found = report(result(1, slot_entry(8.0), peer_entry("engine", 24.0)))
        kwargs["listener"].gate(found.gates[0])
        kwargs["listener"].result(found.results[0])
        kwargs["listener"].report(found.model_copy(update={"complete": False}))
        return found

    monkeypatch.setattr(runner, "bench", made)
    monkeypatch.setattr(cli_bench, "_check_cuda", lambda device: None)
    return seen


def test_the_list_needs_no_gpu() -> None:
    done = program("bench", "--list", "accept_tail")
    assert done.returncode == 0, done.stderr
    assert "1, 2, 4, 8, 16, 32" in done.stdout
    assert "engine-switches" in done.stdout
    assert "48 sizes" in done.stdout


def test_the_list_as_json() -> None:
    found = answer("bench", "--dry-run", "--quick", "--json")
    assert {size["batch"] for size in found["sizes"]} == {1, 4, 32}
    assert found["settings"] == QUICK.model_dump(mode="json")
    assert [peer["name"] for peer in found["peers"]["context_kv"]] == ["eager", "engine-eager", "engine"]
    slots = {slot for size in found["sizes"] for slot in size["slots"]}
    assert {"markov", "accept_tail", "step_inputs", "context_kv"} <= slots


_LIMIT = "target_step: serves at most 4 requests a step; not timed at B "


def test_a_slot_is_not_asked_for_more_requests_than_it_serves(settings_of: list[Settings]) -> None:
    done = invoke("bench", "--list", "target_step")
    assert "1, 2, 4 " in done.stdout
    assert f"{_LIMIT}8, 16, 32" in done.stdout
    found = answer("bench", "--list", "target_step", "target_argmax_head", "--quick", "--json")
    batches = {(size["seam"], size["batch"]) for size in found["sizes"]}
    assert {batch for seam, batch in batches if seam == "target_forward"} == {1, 4}
    assert {batch for seam, batch in batches if seam == "target_argmax"} == {1, 4, 32}
    assert found["left_out"] == [f"{_LIMIT}32"]
    assert settings_of == []
    assert f"{_LIMIT}32" in invoke("bench", "target_step", "--quick").stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Settings()),
        (["--quick"], QUICK),
        (["--quick", "--batch", "2, 2,8"], QUICK.model_copy(update={"batches": (2, 8)})),
        (["--dtype", "float32", "--vocab", "100"], Settings(dtypes=("float32",), vocabs=(100,))),
        (["--peers", "none"], Settings(peers=())),
        (["--peers", "eager,engine"], Settings(peers=("eager", "engine"))),
        (["--repetitions", "7", "--time-limit", "90"], Settings(repetitions=7, time_limit=90.0)),
        (["--device", "cuda:1"], Settings(device="cuda:1")),
    ],
    ids=lambda value: " ".join(value) or "plain" if isinstance(value, list) else "",
)
def test_options_become_settings(settings_of: list[Settings], arguments: list[str], expected: Settings) -> None:
    assert invoke("bench", *arguments).exit_code == 0
    assert settings_of == [expected]


def test_the_table_is_last_and_progress_goes_to_stderr(settings_of: list[Settings]) -> None:
    done = invoke("bench")
    assert done.stdout.index("## Cases") < done.stdout.index("## verify_accept") < done.stdout.index("**accept_tail**")
    assert "accept_tail: 6 of 23 cases, all pass" in done.stderr
    assert "greedy_accept B 1 V 151936 bfloat16: accept_tail 8.00, engine 24.0 (us)" in done.stderr


def test_the_answer_as_json(settings_of: list[Settings]) -> None:
    found = answer("bench", "--json")
    assert Report.model_validate(found) == report(result(1, slot_entry(8.0), peer_entry("engine", 24.0)))


def test_a_slot_without_a_time_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, settings_of: list[Settings]) -> None:
    monkeypatch.setattr(runner, "bench", lambda *args, **kwargs: report(result(1, _FAILED)))
    assert invoke("bench").exit_code == 1


def test_a_folder_gets_report_table_and_plots(settings_of: list[Settings], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    assert invoke("bench", "--out", str(folder)).exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "table.md", "verify_accept.png"]
    assert files.read(folder).complete


def test_without_matplotlib_a_run_still_writes_its_figures(
    monkeypatch: pytest.MonkeyPatch, settings_of: list[Settings], tmp_path: Path
) -> None:
    monkeypatch.setattr(plots, "missing", lambda: "plots need matplotlib")
    done = invoke("bench", "--out", str(tmp_path))
    assert done.exit_code == 0
    assert "plots need matplotlib; or draw them elsewhere with --redraw" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "table.md"]
    assert "plots need matplotlib" in answer("bench", "--redraw", str(tmp_path), "--json", code=2)["error"]


def test_redraw_makes_table_and_plots_again(tmp_path: Path) -> None:
    files.write(report(result(1, slot_entry(8.0))), tmp_path)
    (tmp_path / "table.md").unlink()
    found = answer("bench", "--redraw", str(tmp_path), "--json")
    assert found == {"written": [str(tmp_path / "table.md"), str(tmp_path / "verify_accept.png")]}
    assert all(Path(path).exists() for path in found["written"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batch", "1,x"], "--batch '1,x': write whole numbers from 1 to 1024"),
        (["--batch", "0"], "whole numbers from 1"),
        (["--batch", ","], "one name or more"),
        (["--vocab", "-5"], "--vocab '-5'"),
        (["--dtype", "fp8"], "one or more of bfloat16, float32, float16"),
        (["--peers", "egine"], "egine is none of eager, engine, engine-eager"),
        (["acept_tail"], "Did you mean 'accept_tail'"),
        (["post_fold"], "timed as a peer"),
        (["target_step", "--batch", "8,16"], f"nothing to time: {_LIMIT}8, 16"),
        (["target_step", "--quick"], "sees no NVIDIA GPU here; 'sgl-mega bench --list'"),
        (["--device", "cpu"], "a time in Triton's interpreter means nothing"),
        ([], "sees no NVIDIA GPU here; 'sgl-mega bench --list'"),
    ],
    ids=lambda value: " ".join(value) or "plain" if isinstance(value, list) else "",
)
def test_wrong_use(monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("bench", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr
    assert says in answer("bench", *arguments, "--json", code=2)["error"]


@pytest.mark.parametrize("content", [None, "{", '{"format": 1}'], ids=["no-file", "no-json", "no-report"])
def test_redraw_needs_a_report(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "bench.json").write_text(content)
    assert "has no report that can be read" in answer("bench", "--redraw", str(tmp_path), "--json", code=2)["error"]


def test_a_folder_that_cannot_be_made(settings_of: list[Settings], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = answer("bench", "--out", str(tmp_path / "file" / "run"), "--json", code=2)
    assert "cannot be made a folder" in found["error"]
