"""The tools that time servers: what an arm means, what is compared with what, and what a trace counts."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import compare_servers
import draw_step
import pytest
import step_profile
from compare_servers import Arm
from fake_server import FakeServer, letters, serving

from sgl_mega_plugin.switch import MASTER_VARIABLES


def test_an_arm_is_a_name_an_environment_and_flags() -> None:
    arm = Arm.parse("plugin:@simulate=3.41,A=1:--enable-nvidia-megakernel --x 2", 1)
    assert (arm.name, arm.flags, arm.simulates) == ("plugin", ["--enable-nvidia-megakernel", "--x", "2"], "3.41")
    assert arm.environ["A"] == "1"
    assert arm.environ["SGLANG_SIMULATE_ACC_METHOD"] == "match-expected"
    assert Arm.parse("base", 1).environ == {}
    assert Arm.parse("base", 1).simulates is None
    assert Arm.parse("s:@switches", 1).environ == dict.fromkeys(MASTER_VARIABLES, "1")


def test_a_trace_is_taken_when_it_stopped_growing_and_none_is_no_error(tmp_path: Path) -> None:
    assert compare_servers.whole_trace(tmp_path, 0.1) is None
    (tmp_path / "1").mkdir()
    path = tmp_path / "1" / "a.trace.json"
    path.write_text("{}")
    assert compare_servers.whole_trace(tmp_path, 5.0) == path


def test_an_arm_without_a_trace_has_its_speed_in_the_table() -> None:
    arm = {"arm": "base", "median": {"k": 5.0}, "tokens_per_s": {"k": [5.0]}, "speed_over_it": {"k": 1.0}}
    assert "5 [5 to 5]" in draw_step.table([arm | {"profile": {"trace": "none in 60 s", "host": {}}}])


def test_a_stream_is_counted_from_its_first_chunk_to_its_last() -> None:
    fake = FakeServer()
    with serving(fake):
        arm = Arm.parse("base", int(fake.url.rpartition(":")[2]))
        first, last, tokens, ids = arm.stream([1, 2, 3], 16, 0.0)
    assert 0 < first < last
    assert (tokens, ids) == (14, letters("[1, 2, 3]")[:16])  # the first chunk has two
    assert fake.seen[-1]["sampling_params"] == {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}


def test_an_empty_stream_has_no_speed() -> None:
    fake = FakeServer(answer=lambda text: [])
    fake.events = lambda body: iter(())  # type: ignore[method-assign]
    with serving(fake), pytest.raises(RuntimeError, match="server 'base' answered with an empty stream"):
        Arm.parse("base", int(fake.url.rpartition(":")[2])).stream([1], 4, 0.0)


@pytest.mark.parametrize("crashes", [False, True])
def test_what_a_server_started_ends_with_it(tmp_path: Path, crashes: bool) -> None:
    file = tmp_path / "pid"
    scheduler = f"trap '' TERM; echo $$ > {file}; while :; do sleep 0.1; done"
    command = [
        "sh",
        "-c",
        f'sh -c "$0" & while ! test -s {file}; do sleep 0.05; done; {"exit 1" if crashes else "wait"}',
    ]
    arm = Arm.parse("base", 1)
    arm.process = subprocess.Popen([*command, scheduler], start_new_session=True)
    until = time.monotonic() + 10
    while not (file.exists() and file.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.05)
    if crashes:
        arm.process.wait(10)
    pid = int(file.read_text())
    os.kill(pid, 0)
    arm.stop()
    while (
        time.monotonic() < until
        and Path(f"/proc/{pid}").exists()
        and " Z " not in Path(f"/proc/{pid}/stat").read_text()
    ):
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text()


def _arm(text: str, speeds: list[float], outputs: list[list[int]]) -> Arm:
    arm = Arm.parse(text, 1)
    arm.speeds, arm.outputs = {"users 1 temperature 0": speeds}, {"users 1 temperature 0": outputs}
    return arm


def test_an_arm_is_compared_with_the_first_that_simulates_what_it_does() -> None:
    arms = [
        _arm("base:@simulate=3", [100.0, 90.0, 110.0], [[1], [2]]),
        _arm("plugin:@simulate=3", [150.0, 200.0, 140.0], [[1], [2]]),
        _arm("real", [50.0], [[7], [8]]),
        _arm("realplugin", [60.0], [[7], [9]]),
    ]
    rows = compare_servers.report(arms, argparse.Namespace(model="folder/name"))["arms"]
    assert [row["compared_with"] for row in rows] == ["base", "base", "real", "real"]
    assert [row["speed_over_it"]["users 1 temperature 0"] for row in rows] == [1.0, 1.5, 1.0, 1.2]
    assert rows[1]["same_output"]["users 1 temperature 0"] == [True, True]
    assert rows[3]["same_output"]["users 1 temperature 0"] == [True, False]


def test_a_run_that_is_held_says_that_its_servers_are_up_and_measures_once_it_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "go"
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(compare_servers.wait_for, file)
        with pytest.raises(TimeoutError):
            held.result(0.5)
        assert capsys.readouterr().out == "up\n"
        file.touch()
        held.result(10)
    compare_servers.wait_for(None)
    assert capsys.readouterr().out == ""


def test_arms_are_looked_into_by_name() -> None:
    arms = [Arm.parse(name, 1) for name in ("base", "switches", "plugin")]
    assert compare_servers.looked_into(arms, []) == arms
    assert compare_servers.looked_into(arms, ["plugin", "base"]) == [arms[0], arms[2]]
    with pytest.raises(SystemExit, match="no arm is called plugins"):
        compare_servers.looked_into(arms, ["base", "plugins"])


def test_two_arms_of_one_name_are_wrong_use_and_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a server was started"))
    arguments = ["--model", "m", "--out", str(tmp_path / "out.json"), "--arm", "base", "--arm", "base:A=1"]
    monkeypatch.setattr(sys, "argv", ["compare_servers.py", *arguments])
    with pytest.raises(SystemExit) as left:
        compare_servers.main()
    assert left.value.code == 2
    assert "two servers are called base: give each a name of its own" in capsys.readouterr().err


def test_a_model_that_brings_its_draft_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kwargs: started.append(command))
    for draft in ("DRAFT", None):
        args = argparse.Namespace(model="MODEL", draft=draft, dummy=False, server=[], logs=str(tmp_path))
        Arm.parse("base", 1).start(args)
    named, bundled = started
    assert named[named.index("--speculative-draft-model-path") + 1] == "DRAFT"
    assert bundled == [word for word in named if word not in ("--speculative-draft-model-path", "DRAFT")]


def _event(name: str, category: str, start: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": length}


@pytest.mark.parametrize("zipped", [False, True])
def test_a_trace_counts_calls_and_gpu_time_without_counting_overlap_twice(tmp_path: Path, zipped: bool) -> None:
    events = [
        _event("cudaGraphLaunch", "cuda_runtime", 0, 5),
        _event("cudaGraphLaunch_v10000", "cuda_runtime", 6, 5),
        _event("cudaLaunchKernelExC", "cuda_runtime", 12, 1),
        _event("cudaMemcpyAsync", "cuda_runtime", 14, 1),
        _event("cudaFuncGetAttributes", "cuda_runtime", 16, 1),
        _event("gemm", "kernel", 100, 50),
        _event("other stream", "kernel", 120, 40),
        _event("copy", "gpu_memcpy", 300, 10),
        {"ph": "i", "name": "mark", "cat": "kernel", "ts": 0},
    ]
    path = tmp_path / ("a.trace.json.gz" if zipped else "a.trace.json")
    text = json.dumps({"traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    found = step_profile.of_trace(path, 2)
    assert found["calls_a_step"] == {
        "copies and fills": 0.5,
        "graph launches": 1.0,
        "kernel launches": 0.5,
        "other calls": 0.5,
    }
    assert (found["gpu_kernels_a_step"], found["gpu_busy_us_a_step"], found["gpu_wall_us_a_step"]) == (1.5, 35.0, 105.0)
    assert found["gpu_us_a_step_by_kernel"] == {"gemm": 25.0, "other stream": 20.0, "copy": 5.0}
    assert step_profile.timeline(path, 150.0) == [("gpu", 100.0, 10)]  # from the middle of the GPU's work, 200, on


def test_the_tables_have_each_arm_with_its_spread_and_its_step(tmp_path: Path) -> None:
    profile = {
        "calls_a_step": {"graph launches": 2.0},
        "gpu_kernels_a_step": 700.0,
        "gpu_busy_us_a_step": 1900.0,
        "gpu_wall_us_a_step": 3900.0,
        "host": {"share_in_forward_batch_generation": 0.66},
        "timeline": [["gpu", 0.0, 5.0], ["graph launches", 10.0, 2.0]],
    }
    arms = [
        _arm("base:@simulate=3", [100.0, 90.0, 110.0], [[1]]),
        _arm("plugin:@simulate=3", [150.0, 200.0, 140.0], [[1]]),
        _arm("real", [50.0], [[7]]),
    ]
    arms[0].profile, arms[1].profile = profile, profile | {"calls_a_step": {"graph launches": 1.0}}
    found = compare_servers.report(arms, argparse.Namespace(model="name"))
    (tmp_path / "step.json").write_text(json.dumps(found))
    draw_step.main([str(tmp_path / "step.json")])
    text = (tmp_path / "step.md").read_text()
    assert "| plugin | 150 [140 to 200], 1.50x |" in text
    assert "| graph launches | 2.0 | 1.0 |" in text
    assert "| scheduler's loop inside forward_batch_generation | 66.0% | 66.0% |" in text
    assert text.count("| tokens/s |") == 2  # arms that simulate and arms that do not
    assert (tmp_path / "step.png").stat().st_size > 5_000
