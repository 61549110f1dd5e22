"""The runner of server test kits: every outcome, the time limits, and what counts as worse than without the plugin."""

from __future__ import annotations

import json
import subprocess
import sys
import unittest
from pathlib import Path

import pytest
import run_server_kits
from fake_server import FakeServer, serving

KITS = """
import os, threading, time, unittest
from server_client import Server, call
from run_server_kits import Kit

class Fixture(unittest.TestCase):
    def _callTestMethod(self, method):
        try:
            method()
        except Exception:
            raise Exception("gave up")
    @classmethod
    def setUpClass(cls):
        raise RuntimeError("starts a server")

class Mixin:
    word = "default"
    def test_passes(self):
        print("seen", self.word, self.model, self.process.poll())
        assert self.word == "own" and self.process.poll() is None
        self.flush_cache()
        assert "127.0.0.1" in os.environ["NO_PROXY"].split(","), os.environ["NO_PROXY"]
    def test_fails(self):
        self.assertEqual(1, 2)
    def test_breaks(self):
        raise ValueError("broken\\nin two lines")
    def test_skips(self):
        raise unittest.SkipTest("not here")
    def test_returns_early(self):
        print("No cache here, skipping test")
    def test_fails_in_a_thread(self):
        thread = threading.Thread(target=lambda: self.assertEqual(1, 3))
        thread.start()
        thread.join()
    def test_fails_once_and_skips_once(self):
        with self.subTest("a"):
            self.fail("seen")
        with self.subTest("b"):
            self.skipTest("unseen")
    @unittest.expectedFailure
    def test_was_to_fail(self):
        pass
    def test_hangs(self):
        time.sleep(60)
    def test_dies(self):
        import os
        os._exit(3)
    def test_plugin_fails(self):
        answer = call(Server("x", self.base_url), "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2}})
        assert answer["output_ids"] == [120, 127], answer

class Pauses:
    def test_stops_halfway(self):
        call(Server("x", self.base_url), "/pause_generation", {"mode": "in_place"})
        time.sleep(60)

class Needy:
    parity_prompts = ["a"]
    def test_parity(self):
        assert self.parity_ref_outputs == {"a": "\\\\boxed{97}"}, self.parity_ref_outputs

TABLE = (
    Kit("made_kits", "Mixin", {"word": "own"}, fixture="made_kits:Fixture"),
    Kit("made_kits", "Pauses", fixture="made_kits:Fixture", alone=True, after="/continue_generation"),
    Kit("made_kits", "Needy", needs=("reference",), fixture="made_kits:Fixture", alone=True),
    Kit("made_kits", "Absent", fixture="made_kits:Fixture"),
)
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, str]]]:
    """What a run on two servers wrote, in a process of its own since it forks; by server and test."""
    folder = tmp_path_factory.mktemp("kits")
    (folder / "made_kits.py").write_text(KITS)
    tools = Path(run_server_kits.__file__).parent
    command = [sys.executable, str(tools / "run_server_kits.py"), "--model", "made", "--table", "made_kits:TABLE"]
    with serving(FakeServer()) as base, serving(FakeServer(answer=lambda text: [9, 9])) as plugin:
        command += [f"--server=base={base.url}", f"--server=plugin={plugin.url}", f"--reference=r={base.url}"]
        command += ["--out", str(folder / "out"), "--test-limit-s", "4", "--limit-s", "60"]
        path = f"{folder}:{tools}:{tools.parent}"
        done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("WORSE plugin: made.Mixin.test_plugin_fails") == 1, done.stdout
    assert done.stdout.count("WORSE") == 1
    for server in (base, plugin):  # a kit that was stopped between the two leaves the server paused
        paths = [row["path"] for row in server.seen]
        assert paths.index("/pause_generation") < paths.index("/continue_generation")
    found = json.loads((folder / "out" / "kits.json").read_text())
    assert "seen own made None" in (folder / "out" / "base.Mixin.test_passes.out").read_text()
    return {
        server: {row["test"]: row for row in found["rows"] if row["server"] == server} for server in ("base", "plugin")
    }


@pytest.mark.parametrize(
    ("test", "base", "plugin", "why"),
    [
        ("test_passes", "passed", "passed", ""),
        ("test_fails", "failed", "failed", "1 != 2"),
        ("test_breaks", "error", "error", "ValueError: broken"),
        ("test_skips", "skipped", "skipped", "not here"),
        ("test_returns_early", "skipped", "skipped", "it printed: No cache here, skipping test"),
        ("test_fails_in_a_thread", "failed", "failed", "in a thread: AssertionError: 1 != 3"),
        ("test_fails_once_and_skips_once", "failed", "failed", "seen"),
        ("test_was_to_fail", "error", "error", "it was expected to fail"),
        ("test_stops_halfway", "error", "error", "no end after 4 s"),
        ("test_hangs", "error", "error", "no end after 4 s"),
        ("test_dies", "error", "error", "code 3"),
        ("test_plugin_fails", "passed", "failed", ""),
        ("test_parity", "passed", "passed", ""),
        ("*", "error", "error", "has no attribute 'Absent'"),
    ],
)
def test_a_test_ends_in_one_outcome_with_its_reason(
    rows: dict[str, dict[str, dict[str, str]]], test: str, base: str, plugin: str, why: str
) -> None:
    found = [rows[server][test] for server in ("base", "plugin")]
    assert [row["outcome"] for row in found] == [base, plugin], found
    assert why in found[0]["why"], found


def test_what_a_kit_needs_and_is_not_there_is_no_pass() -> None:
    rows = [
        {"kit": "k", "test": "t", "server": "base", "outcome": "needs", "why": "a server"},
        {"kit": "k", "test": "t", "server": "plugin", "outcome": "needs", "why": "a server"},
        {"kit": "k", "test": "u", "server": "base", "outcome": "passed", "why": ""},
        {"kit": "k", "test": "u", "server": "plugin", "outcome": "not run", "why": "the time | was over"},
    ]
    assert run_server_kits.table(rows, ["base", "plugin"]).splitlines()[2:] == [
        "| k | t | needs | needs | a server |",
        "| k | u | passed | not run | the time \\| was over |",
    ]
    assert run_server_kits.worse(rows, ["base", "plugin"]) == ["plugin: k.u: not run: the time | was over"]


def test_a_test_that_has_no_result_is_no_pass() -> None:
    rows = [{"kit": "k", "test": "t", "server": "base", "outcome": "passed", "why": ""}]
    assert run_server_kits.worse(rows, ["base", "plugin"]) == ["plugin: k.t: no result: "]


@pytest.mark.parametrize(
    ("printed", "outcome"),
    [
        ("Radix cache is disabled, skipping test", "skipped"),
        ("avg_spec_accept_length=None", "skipped"),
        ("avg_spec_accept_length=2.5", "passed"),
        ("Prefill cache miss for prompt 3, skipping", "passed"),
        ("All retry attempts exhausted for request. Returning empty response.", "failed"),
        ('{"text": "Bad Request Error, skipping test"}', "passed"),
    ],
)
def test_what_a_kit_prints_tells_that_it_tested_nothing(printed: str, outcome: str) -> None:
    result = unittest.TestResult()
    result.testsRun = 1
    assert run_server_kits._found(result, [], f"before\n{printed}\nafter\n")["outcome"] == outcome


def test_a_test_that_was_not_run_is_no_pass() -> None:
    assert run_server_kits._found(unittest.TestResult(), [], "")["outcome"] == "error"


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "made_kits.py").write_text(KITS)
    tools = Path(run_server_kits.__file__).parent
    command = [sys.executable, str(tools / "run_server_kits.py"), "--model", "made", "--table", "made_kits:TABLE"]
    command += ["--out", str(folder / "out"), *arguments]
    path = f"{folder}:{tools}:{tools.parent}"
    return subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=100)


def test_a_run_in_which_nothing_passes_is_no_success(tmp_path: Path) -> None:
    with serving(FakeServer()) as base:
        done = _run(tmp_path, f"--server=base={base.url}", "--kits", "Absent")
    assert (done.returncode, "nothing passed on 'base'" in done.stdout) == (1, True), done.stderr


def test_a_server_whose_run_broke_off_is_named_and_an_earlier_result_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "base.Needy.test_parity.json").mkdir()  # cannot be removed as a file: the run raises
    old = [{"kit": "made.Needy", "test": "test_parity", "server": "base", "outcome": "passed", "why": "old"}]
    (tmp_path / "out" / "base.json").write_text(json.dumps(old))
    with serving(FakeServer()) as base:
        done = _run(tmp_path, f"--server=base={base.url}", f"--reference=r={base.url}", "--kits", "Needy")
    assert done.returncode == 1
    assert "BROKEN base: the run ended with code 1" in done.stdout, done.stdout
    assert json.loads((tmp_path / "out" / "kits.json").read_text())["rows"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server=a=http://h:1", "--server=a=http://h:2"], "two servers are called a"),
        (["--server=a=http://h:1", "--have", "gsm8k"], "there is no /no/such/file: the kit would download it"),
    ],
)
def test_a_run_that_could_not_tell_does_not_start(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_server_kits, "GSM8K", "/no/such/file")
    monkeypatch.setattr(run_server_kits.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(SystemExit):
        run_server_kits.main([*arguments, "--model", "m", "--out", str(tmp_path / "out")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_need_of_a_kit_is_explained() -> None:
    needs = {need for kit in run_server_kits.KITS for need in kit.needs}
    assert needs == set(run_server_kits.NEEDS)
    assert len({kit.mixin for kit in run_server_kits.KITS}) == len(run_server_kits.KITS)
