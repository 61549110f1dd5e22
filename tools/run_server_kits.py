"""Run the server test kits of the engine's wheel (``sglang.test.kits``) against servers that already run.

    python tools/run_server_kits.py --server base=http://127.0.0.1:31000 --server plugin=http://127.0.0.1:31100 \\
        --model FOLDER --reference ref=http://127.0.0.1:31200 --out FOLDER

The kits are ``unittest`` mixins whose fixtures start a server; here each is mixed into the fixture's class, with the
start left out. Every test runs in a process of its own with a time limit: several at a time, and alone those that
pause, abort or flush what others wait for. Servers are tested at the same time. The table has an arm a column; what a
kit needs and this run does not give stands as ``needs``, never as passed, and a kit that returns early and prints so is
``skipped``. The exit code is 1 where a test passes on the first server and not on another, and where none passes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing as mp
import os
import re
import signal
import sys
import threading
import time
import traceback
import types
import unittest
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prompt_files import first_turns, prompts_argument
from server_client import Server, ServerError, call, different_names, flush, server_argument, wait_idle

KITS_FOLDER = "sglang.test.kits"
#: The class that the kits are mixed into: its helpers and tokenizer are used, its server start is not.
FIXTURE = "sglang.test.server_fixtures.spec_eagle_fixture:SpecEagleServerBase"
#: Where the engine's benchmark helpers keep the file that they otherwise download.
GSM8K = "/tmp/test.jsonl"
#: What a kit prints when it returns without having tested, or goes on after what should have failed it.
_PRINTS = (
    (re.compile(r"^.*, skipping test$", re.MULTILINE), "skipped"),
    (re.compile(r"^avg_spec_accept_length=None$", re.MULTILINE), "skipped"),
    (re.compile(r"^(All retry attempts exhausted|Bad Request Error).*$", re.MULTILINE), "failed"),
)


@dataclass(frozen=True)
class Kit:
    """One mixin: where it is, what it reads from its class, and whether its tests must run alone.

    ``needs`` names conditions of the server that the run must be told of with ``--have``. ``after`` is posted when a
    test of it ended, however it ended: what undoes the state in which a test that was stopped leaves the server.
    """

    module: str
    mixin: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    needs: tuple[str, ...] = ()
    fixture: str = FIXTURE
    after: str = ""

    @property
    def name(self) -> str:
        return f"{self.module.rpartition('.')[2].removesuffix('_kit').removesuffix('_kits')}.{self.mixin}"


def _kit(module: str, mixin: str, *needs: str, alone: bool = False, after: str = "", **attributes: Any) -> Kit:
    return Kit(f"{KITS_FOLDER}.{module}", mixin, attributes, alone, needs, after=after)


#: Thresholds of quality and speed are for a 135M target with a small draft on a shared GPU: they catch breakage only.
KITS = (
    _kit("spec_server_kits", "SpecCorrectnessKit", acc_length_thres=1.3, batch_accept_len_thres=1.1),
    _kit("spec_server_kits", "SpecParityKit", "reference"),
    _kit("spec_server_kits", "SpecLogprobKit"),
    _kit("spec_server_kits", "SpecPenaltyKit"),
    _kit("spec_server_kits", "SpecGrammarKit"),
    _kit("spec_server_kits", "SpecSamplingMaskKit"),
    _kit("spec_server_kits", "SpecFeatureKit", alone=True),
    _kit("spec_server_kits", "SpecPerfKit", "gsm8k", alone=True, perf_output_throughput_thres=0),
    _kit(
        "spec_server_kits", "SpecAccuracyKit", "gsm8k", alone=True,
        gsm8k_num_examples=64, gsm8k_score_thres=-1.0, gsm8k_accept_len_thres=1.1,
    ),
    _kit("spec_server_kits", "SpecHiddenStatesKit", "hidden-states"),
    _kit("basic_api_contract_kit", "BasicAPIContractMixin"),
    _kit("basic_decode_correctness_kit", "BasicDecodeCorrectnessMixin"),
    _kit("basic_scheduler_stress_kit", "BasicSchedulerStressMixin", alone=True),
    _kit("matched_stop_kit", "MatchedStopMixin"),
    _kit("json_constrained_kit", "JSONConstrainedMixin"),
    _kit("regex_constrained_kit", "RegexConstrainedMixin"),
    _kit("ebnf_constrained_kit", "EBNFConstrainedMixin"),
    _kit("kl_divergence_kit", "KLDivergenceMixin", "kl-prompts", alone=True, kl_div_thres=0.05, kl_div_max_samples=16),
    _kit("prefix_cache_branching_kit", "PrefixCacheBranchingMixin", "chunk-cache", alone=True, cache_chunk_size=64),
    _kit("abort_timeout_kit", "AbortAllMixin", alone=True, abort_all_max_new_tokens=4000),
    _kit("abort_timeout_kit", "WaitingTimeoutMixin", "waiting-timeout", alone=True),
    _kit("abort_timeout_kit", "RunningTimeoutTwoWaveMixin", "running-timeout", alone=True),
    _kit(  # the kit pauses after a second, in which a small target ends 512 tokens
        "pause_generation_kit", "PauseResumeInPlaceMixin", alone=True, after="/continue_generation",
        pause_max_new_tokens=3000, pause_ignore_eos=True,
    ),
    _kit("streaming_session_kit", "StreamingSessionKitMixin", "streaming-session", alone=True),
    _kit("streaming_session_kit", "AbortLeakReproKitMixin", "streaming-session-512", alone=True),
    # radix_cache_server_kit is a function; SpecFeatureKit.test_radix_attention calls it.
)  # fmt: skip

NEEDS = {
    "reference": "a server of the target without speculation: --reference",
    "gsm8k": f"the gsm8k test set with answers as {GSM8K}, where the kit looks before it downloads",
    "kl-prompts": "48 prompts as ids in the kit's cache: --kl-prompts",
    "chunk-cache": "a model with recurrent state, whose prefix cache keeps only branches, at chunks of 64 tokens",
    "hidden-states": "a server with --enable-return-hidden-states",
    "waiting-timeout": "a server with SGLANG_REQ_WAITING_TIMEOUT and --max-running-requests 1",
    "running-timeout": "a server with SGLANG_REQ_RUNNING_TIMEOUT",
    "streaming-session": "a server with --enable-streaming-session",
    "streaming-session-512": "a server with --enable-streaming-session, context 512, page size 256, chunks of 4,096",
}


class _RunningServer:
    """What a kit asks of the process that its fixture would have started: whether it still runs."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pid = os.getpid()

    def poll(self) -> int | None:
        try:
            call(self.server, "/health", timeout=20)
        except Exception:
            return 1
        return None


@dataclass(frozen=True)
class Task:
    """A test of a kit on a server."""

    kit: Kit
    test: str
    server: Server
    model: str
    reference: Server | None

    def case(self) -> unittest.TestCase:
        """The test as ``unittest`` wants it, on the running server."""
        server, reference = self.server, self.reference

        def flush_cache(cls: type) -> None:
            flush(server)

        def set_up(cls: Any) -> None:
            if reference is not None and hasattr(cls, "parity_prompts"):
                cls.parity_ref_outputs = {prompt: _greedy(reference, prompt) for prompt in cls.parity_prompts}

        own = {
            "base_url": server.url,
            "model": self.model,
            "target_model": self.model,
            "process": _RunningServer(server),
            "_tokenizer": None,
            "flush_cache": classmethod(flush_cache),
            "_callTestMethod": unittest.TestCase.__dict__["_callTestMethod"],  # the fixture's hides what was raised
            "setUpClass": classmethod(set_up),
            "tearDownClass": classmethod(lambda cls: None),
        }
        bases = (_load(self.kit.module, self.kit.mixin), _load(*self.kit.fixture.split(":")))
        made = type(self.kit.mixin, bases, own | dict(self.kit.attributes))
        found: unittest.TestCase = made(self.test)
        return found


def _greedy(server: Server, prompt: str) -> str:
    """What the kit itself asks its reference server."""
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 48}}
    return str(call(server, "/generate", body)["text"])


def _load(module: str, name: str) -> type:
    found: type = getattr(importlib.import_module(module), name)
    return found


def prepare(servers: Sequence[Server] = ()) -> None:
    """Import what the kits need once, so that the tests' processes are forked with it; no proxy for the servers.

    The engine's test helpers import ``datasets`` for benchmarks that no kit here runs; where it cannot be imported (its
    pandas is missing), an empty module stands in, and a use of it fails.
    """
    hosts = {urlsplit(server.url).hostname or "" for server in servers}
    for name in ("NO_PROXY", "no_proxy"):  # the kits' HTTP clients heed proxies of the environment
        os.environ[name] = ",".join(sorted(hosts | set(filter(None, os.environ.get(name, "").split(",")))))
    try:
        importlib.import_module("datasets")
    except ImportError:
        stub = types.ModuleType("datasets", "Stands in for a package that does not import here.")
        vars(stub)["__getattr__"] = _no_dataset
        sys.modules["datasets"] = stub


def _no_dataset(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def load(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"datasets.{name} is called, and the package datasets does not import here")

    return load


def run_test(task: Task, out: Path) -> None:
    """In a process of its own: the test, its output beside its outcome."""
    os.setsid()
    printed = out.with_suffix(".out")
    with printed.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        threads: list[str] = []
        threading.excepthook = lambda raised: threads.append("".join(traceback.format_exception(raised.exc_value)))
        result = unittest.TestResult()
        unittest.TestSuite([task.case()]).run(result)
        sys.stdout.flush()
        found = _found(result, threads, printed.read_text(errors="replace"))
        print(found.pop("text"), flush=True)
        part = out.with_suffix(".part")  # renamed when it is whole: the process may be killed at any time
        part.write_text(json.dumps(found))
        part.replace(out)


def _found(result: unittest.TestResult, threads: Sequence[str], printed: str) -> dict[str, str]:
    """Outcome, reason and text of a test: the worst that was reported, raised in a thread of the test, or printed."""
    for outcome, entries in (("error", result.errors), ("failed", result.failures), ("skipped", result.skipped)):
        if entries:
            text = entries[0][1].strip()
            return {"outcome": outcome, "why": _reason(text), "text": text}
    if threads:  # a kit whose threads assert does not see it
        return {"outcome": "failed", "why": f"in a thread: {_reason(threads[0])}", "text": "\n".join(threads)}
    if result.unexpectedSuccesses or not result.testsRun:
        why = "it was expected to fail" if result.unexpectedSuccesses else "no test was run"
        return {"outcome": "error", "why": why, "text": why}
    for pattern, outcome in _PRINTS:
        if line := pattern.search(printed):
            return {"outcome": outcome, "why": f"it printed: {line[0]}"[:300], "text": ""}
    return {"outcome": "passed", "why": "", "text": ""}


def _reason(text: str) -> str:
    """The first line of the exception that ends a traceback, or of the text that is none."""
    lines = text.splitlines()
    frames = [index for index, line in enumerate(lines) if line.startswith("  File ")]
    return next((line for line in lines[frames[-1] if frames else 0 :] if line.strip() and line[0] != " "), "")[:300]


def tasks_of(kit: Kit, server: Server, model: str, reference: Server | None) -> Iterator[Task]:
    loader = unittest.TestLoader()
    for test in loader.getTestCaseNames(_load(kit.module, kit.mixin)):
        yield Task(kit, test, server, model, reference)


def run_tasks(tasks: Sequence[Task], workers: int, limit_s: float, until: float, out: Path) -> list[dict[str, Any]]:
    """Run tests, ``workers`` at a time, each for at most ``limit_s`` seconds and none past ``until`` (monotonic)."""
    context = mp.get_context("fork")
    waiting, rows = list(tasks), []
    running: dict[Any, tuple[Task, Path, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers and time.monotonic() < until:
            task = waiting.pop(0)
            file = out / f"{task.server.name}.{task.kit.mixin}.{task.test}.json"
            file.unlink(missing_ok=True)
            process = context.Process(target=run_test, args=(task, file))
            process.start()
            running[process] = (task, file, time.monotonic())
        if not running:
            rows += [_row(task, "not run", "the time for all was over", 0.0) for task in waiting]
            break
        wait([process.sentinel for process in running], 0.2)
        for process in list(running):
            task, file, since = running[process]
            took = time.monotonic() - since
            late = took > limit_s or time.monotonic() > until
            if process.is_alive() and not late:
                continue
            if process.is_alive():
                with suppress(ProcessLookupError):  # it has no group of its own yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            process.join()
            del running[process]
            rows.append(_outcome(task, file, process.exitcode, took, late))
    return rows


def _outcome(task: Task, file: Path, code: int | None, took: float, late: bool) -> dict[str, Any]:
    if file.exists():
        found = json.loads(file.read_text())
        return _row(task, found["outcome"], found["why"], took)
    why = f"no end after {took:.0f} s" if late else f"its process ended with code {code} and no result"
    return _row(task, "error", why, took)


def _row(task: Task, outcome: str, why: str, took: float) -> dict[str, Any]:
    row = {"kit": task.kit.name, "test": task.test, "server": task.server.name}
    return row | {"outcome": outcome, "why": why, "seconds": round(took, 1)}


def run_kits(
    kits: Sequence[Kit], server: Server, reference: Server | None, have: set[str], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """All kits on one server: first those that bear company, then the others one by one."""
    rows: list[dict[str, Any]] = []
    together: list[Task] = []
    alone: list[Task] = []
    for kit in kits:
        missing = [need for need in kit.needs if need not in have]
        try:
            tasks = list(tasks_of(kit, server, args.model, reference))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:300]
            rows.append({"kit": kit.name, "test": "*", "server": server.name, "outcome": "error", "why": why})
            continue
        if missing:
            rows += [_row(task, "needs", "; ".join(NEEDS.get(need, need) for need in missing), 0.0) for task in tasks]
        else:
            (alone if kit.alone else together).extend(tasks)
    until = time.monotonic() + args.limit_s
    for tasks, workers in ((together, args.workers), *(([task], 1) for task in alone)):
        if workers == 1:
            _leave_to_itself(server, until)
        rows += run_tasks(tasks, workers, args.test_limit_s, until, args.out)
        for path in {task.kit.after for task in tasks} - {""}:
            with suppress(OSError, ServerError):  # a server that is gone fails the tests that come
                call(server, path, {}, timeout=30)
        write_rows(rows, args.out / f"{server.name}.json")
    return rows


def _leave_to_itself(server: Server, until: float) -> None:
    """Let end what a test that was stopped has left running, which the server notices only after seconds."""
    with suppress(OSError, ServerError):
        wait_idle(server, max(0.0, min(20.0, until - time.monotonic())))


def write_rows(rows: list[dict[str, Any]], file: Path) -> None:
    file.write_text(json.dumps(rows, indent=1) + "\n")


def write_kl_prompts(file: Path, model: str, reference: Server, folder: Path) -> None:
    """Put prompts where the KL kit looks for those that it would download: up to 48 lists of ids.

    The kit looks into ``folder`` from then on, so that a later run of it elsewhere does not take ours for its own.
    """
    turns = first_turns([file])
    ids = [
        call(reference, "/tokenize", {"prompt": "\n\n".join(turns[8 * first : 8 * first + 8])})["tokens"]
        for first in range(48)
        if turns[8 * first : 8 * first + 8]
    ]
    from sglang.test import kl_test_utils as kit

    kit.CACHE_DIR = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"input_ids_{model.replace('/', '_')}_{kit.DEFAULT_PROMPT_TOKENS}_{kit.DEFAULT_NUM_SAMPLES}.json"
    (folder / name).write_text(json.dumps(ids))


def table(rows: list[dict[str, Any]], servers: Sequence[str]) -> str:
    """Tests by servers as Markdown, with the first reason that is given."""
    by_test: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_test.setdefault((row["kit"], row["test"]), {})[row["server"]] = row
    lines = ["| kit | test | " + " | ".join(servers) + " | why |", "|---" * (len(servers) + 3) + "|"]
    for (kit, test), found in sorted(by_test.items()):
        cells = [found[name]["outcome"] if name in found else "" for name in servers]
        why = next((found[name]["why"] for name in reversed(servers) if name in found and found[name]["why"]), "")
        why = why.replace("|", "\\|")[:160]
        lines.append(f"| {kit} | {test.removeprefix('test_')} | " + " | ".join([*cells, why]) + " |")
    return "\n".join(lines) + "\n"


def worse(rows: list[dict[str, Any]], servers: Sequence[str]) -> list[str]:
    """Tests that pass on the first server and not on a later one; no result is no pass."""
    by_test = {(row["server"], row["kit"], row["test"]): row for row in rows}
    passed = [(row["kit"], row["test"]) for row in rows if row["server"] == servers[0] and row["outcome"] == "passed"]
    found = []
    for server in servers[1:]:
        for kit, test in passed:
            row = by_test.get((server, kit, test), {"outcome": "no result", "why": ""})
            if row["outcome"] != "passed":
                found.append(f"{server}: {kit}.{test}: {row['outcome']}: {row['why']}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=server_argument, action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--model", required=True, help="folder of the target, for its tokenizer")
    parser.add_argument("--reference", type=server_argument, help="the target served without speculation")
    parser.add_argument("--have", nargs="*", default=[], choices=sorted(NEEDS), help="what kits need and is there")
    parser.add_argument("--kl-prompts", type=prompts_argument, help='JSON lines, {"turns": [...]}, for the KL kit')
    parser.add_argument("--kits", nargs="*", default=[], help="mixins to run; default: all")
    parser.add_argument("--table", default="", metavar="MODULE:NAME", help="another list of kits")
    parser.add_argument("--workers", type=int, default=4, help="tests at a time on a server")
    parser.add_argument("--test-limit-s", type=float, default=90.0)
    parser.add_argument("--limit-s", type=float, default=600.0, help="for all tests of a server")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if importlib.util.find_spec("sglang") is None:
        parser.error("the kits are in SGLang's wheel, which is not installed here: pip install sglang==0.5.23")
    different_names(parser, [server.name for server in args.server])
    if "gsm8k" in args.have and not Path(GSM8K).is_file():
        parser.error(f"--have gsm8k, and there is no {GSM8K}: the kit would download it")
    args.out.mkdir(parents=True, exist_ok=True)
    prepare([*args.server, *([args.reference] if args.reference else [])])
    kits: Sequence[Kit] = KITS
    if args.table:
        module, _, name = args.table.partition(":")
        kits = getattr(importlib.import_module(module), name)
    if unknown := set(args.kits) - {kit.mixin for kit in kits}:
        parser.error(f"no kit is called {sorted(unknown)}; there are {[kit.mixin for kit in kits]}")
    kits = [kit for kit in kits if not args.kits or kit.mixin in args.kits]
    have = set(args.have) | ({"reference"} if args.reference else set())
    if args.kl_prompts:
        write_kl_prompts(args.kl_prompts, args.model, args.server[0], args.out / "kl-prompts")
        have.add("kl-prompts")
    rows, broken = _all_servers(kits, args, have)
    names = [server.name for server in args.server]
    behind = worse(rows, names)
    found = {"kits": [asdict(kit) | {"name": kit.name} for kit in kits], "rows": rows, "worse": behind}
    (args.out / "kits.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
    (args.out / "kits.md").write_text(table(rows, names))
    print(table(rows, names) + "".join(f"WORSE {line}\n" for line in behind) + "".join(f"{line}\n" for line in broken))
    if nothing := not any(row["server"] == names[0] and row["outcome"] == "passed" for row in rows):
        print(f"nothing passed on {names[0]!r}, so nothing is compared")
    return int(bool(behind or broken) or nothing)


def _all_servers(
    kits: Sequence[Kit], args: argparse.Namespace, have: set[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Each server's kits in a process of its own, forked before any thread starts here; the rows, and who broke off."""
    for kit in kits:  # imported once, before the forks
        importlib.import_module(kit.module)
        importlib.import_module(kit.fixture.split(":")[0])
    for server in args.server:  # an earlier run's
        (args.out / f"{server.name}.json").unlink(missing_ok=True)
    context = mp.get_context("fork")
    running = [
        context.Process(target=run_kits, args=(kits, server, args.reference, have, args)) for server in args.server
    ]
    for process in running:
        process.start()
    for process in running:
        process.join()
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    for server, process in zip(args.server, running, strict=True):
        file = args.out / f"{server.name}.json"
        rows += json.loads(file.read_text()) if file.exists() else []
        if process.exitcode:
            broken.append(
                f"BROKEN {server.name}: the run ended with code {process.exitcode}; its rows are not all there"
            )
    return rows, broken


if __name__ == "__main__":
    sys.exit(main())
