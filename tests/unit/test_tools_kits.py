"""The runner of server test kits: every outcome, the time limits, and what counts as worse than without the plugin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import run_server_kits
from fake_server import FakeServer, serving

KITS = """
import time, unittest
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
    def test_fails(self):
        self.assertEqual(1, 2)
    def test_breaks(self):
        raise ValueError("broken\\nin two lines")
    def test_skips(self):
        raise unittest.SkipTest("not here")
    def test_hangs(self):
        time.sleep(60)
    def test_dies(self):
        import os
        os._exit(3)
    def test_plugin_fails(self):
        answer = call(Server("x", self.base_url), "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2}})
        assert answer["output_ids"] == [120, 127], answer

class Needy:
    parity_prompts = ["a"]
    def test_parity(self):
        assert self.parity_ref_outputs == {"a": "\\\\boxed{97}"}, self.parity_ref_outputs

TABLE = (
    Kit("made_kits", "Mixin", {"word": "own"}, fixture="made_kits:Fixture"),
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


def test_every_need_of_a_kit_is_explained() -> None:
    needs = {need for kit in run_server_kits.KITS for need in kit.needs}
    assert needs == set(run_server_kits.NEEDS)
    assert len({kit.mixin for kit in run_server_kits.KITS}) == len(run_server_kits.KITS)
