"""Time decoding of real SGLang servers that differ in environment or flags, and compare what they generate.

    python tools/compare_servers.py --model DIR [--draft DIR] --out FILE.json [--dummy]
        --arm base:@simulate=3.41 --arm switches:@simulate=3.41,@switches
        --arm "plugin:@simulate=3.41:--enable-nvidia-megakernel" [--server --flags --of --every --server]

An arm is NAME[:ENV=VALUE,...][:--flag ...]. ``@switches`` sets the engine's switches that the master switch stands for,
``@simulate=N`` simulates acceptance of N tokens a step; arms are compared with the first that simulates what they do.
All servers start together and stay up; requests go to one server at a time, round after round, so
that what the machine does meanwhile falls on every arm alike. A request is fixed input ids with ``ignore_eos``;
its speed is tokens after the first chunk over the time after it. With ``--users`` above 1, that many stream at once and
the speed is that of all of them. Output ids at temperature 0 are compared between the arms.

Several models on one GPU: start one of these for each with ``--hold FILE``, which measures once FILE exists and says
``up`` before that, and make the files one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import server_client
import step_profile
from server_client import Server

from sgl_mega_plugin.switch import MASTER_VARIABLES

VOCAB = (1_000, 40_000)  # ids of random prompts, in every target's vocabulary
TRACE_S = 60.0  # for a trace to be written: of several servers on one GPU it takes a while
SIMULATED_LENGTH = "SGLANG_SIMULATE_ACC_LEN"
SIMULATED = {"SGLANG_SIMULATE_ACC_METHOD": "match-expected", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}


@dataclass
class Arm:
    """A server, and what was measured of it."""

    name: str
    environ: dict[str, str]
    flags: list[str]
    port: int
    process: subprocess.Popen[bytes] | None = None
    log: str = ""
    start_s: float = 0.0
    speeds: dict[str, list[float]] = field(default_factory=dict)  # tokens/s by "users N temperature T"
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, port: int) -> Arm:
        name, _, rest = text.partition(":")
        environ, _, flags = rest.partition(":")
        values: dict[str, str] = {}
        for pair in filter(None, re.split(r",(?=@|\w+=)", environ)):  # a value may have commas
            variable, _, value = pair.partition("=")
            if variable == "@switches":
                values |= dict.fromkeys(MASTER_VARIABLES, "1")
            elif variable == "@simulate":
                values |= SIMULATED | {SIMULATED_LENGTH: value}
            else:
                values[variable] = value
        return cls(name, values, flags.split(), port)

    @property
    def server(self) -> Server:
        return Server(self.name, f"http://127.0.0.1:{self.port}", self.log)

    @property
    def simulates(self) -> str | None:
        return self.environ.get(SIMULATED_LENGTH)

    def start(self, args: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", args.model, "--port", str(self.port)]
        command += ["--speculative-algorithm", "DSPARK"]
        command += ["--speculative-draft-model-path", args.draft] if args.draft else []
        if args.dummy:
            command += ["--load-format", "dummy", "--speculative-draft-load-format", "dummy"]
        command += ["--skip-tokenizer-init", "--random-seed", "7", "--disable-radix-cache", *args.server, *self.flags]
        self.log = str(Path(args.logs) / f"{self.name}.log")
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | self.environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, since: float, limit_s: float) -> None:
        """Return when the server answers; RuntimeError with the end of its log if it stops or takes too long."""
        assert self.process is not None
        while time.perf_counter() - since < limit_s:
            if self.process.poll() is not None:
                break
            try:
                # SGLang answers after a second at the earliest: it generates a token first, for up to 20 s.
                server_client.call(self.server, "/health", timeout=25)
            except (OSError, server_client.ServerError):
                time.sleep(0.5)
            else:
                self.start_s = round(time.perf_counter() - since, 1)
                return
        tail = Path(self.log).read_text(errors="replace")[-3_000:]
        raise RuntimeError(f"server {self.name!r} did not come up in {limit_s} s; its log ends:\n{tail}")

    def stop(self) -> None:
        """End the server and what it started: a scheduler outlives a server that crashed, and keeps its GPU memory."""
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with suppress(ProcessLookupError):  # nothing of its group is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def look_inside(self, prompt: list[int], args: argparse.Namespace) -> None:
        """Host time from py-spy while a long request runs, then a trace of ``--profile`` steps of another."""
        assert self.process is not None
        folder = Path(args.logs) / f"trace_{self.name}"
        folder.mkdir(exist_ok=True)
        with ThreadPoolExecutor(1) as client:
            if args.py_spy:
                running = client.submit(self.stream, prompt, 4 * args.output, 0.0)
                time.sleep(0.5)
                found = subprocess.run(
                    ["pgrep", "-s", str(self.process.pid), "-f", "sglang::scheduler"], capture_output=True, text=True
                )
                if not found.stdout.split():
                    raise RuntimeError(f"server {self.name!r} has no process called sglang::scheduler to look into")
                pid = int(found.stdout.split()[0])
                host = step_profile.of_host(args.py_spy, pid, 1, folder / "host.raw")
                first, last, tokens, _ = running.result()
                self.profile |= {"host": host, "request_us": (last - first) * 1e6, "request_tokens": tokens}
            running = client.submit(self.stream, prompt, args.output, 0.0)
            time.sleep(0.3)
            body = {"output_dir": str(folder), "num_steps": args.profile, "activities": ["CPU", "GPU"]}
            server_client.call(self.server, "/start_profile", body, timeout=60)
            running.result()
        trace = whole_trace(folder, TRACE_S)
        if trace is None:
            self.profile["trace"] = f"none in {TRACE_S:g} s"
            return
        self.profile |= step_profile.of_trace(trace, args.profile)
        self.profile["timeline"] = step_profile.timeline(trace, 6_000.0)

    def stream(self, ids: list[int], tokens: int, temperature: float) -> tuple[float, float, int, list[int]]:
        """One request: time of its first and last chunk, tokens between them, output ids."""
        parameters = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}
        first = last = 0.0
        seen = [0, 0]
        output: list[int] = []
        for event in server_client.stream(self.server, {"input_ids": ids, "sampling_params": parameters}, timeout=300):
            last, seen[1] = time.perf_counter(), event["meta_info"]["completion_tokens"]
            output = event.get("output_ids", output)
            if not first:
                first, seen[0] = last, seen[1]
        if not first:
            raise RuntimeError(f"server {self.name!r} answered with an empty stream")
        return first, last, seen[1] - seen[0], output

    def measure(self, prompts: list[list[int]], tokens: int, temperature: float) -> None:
        """One round: every prompt at once."""
        with ThreadPoolExecutor(len(prompts)) as users:
            rows = list(users.map(lambda ids: self.stream(ids, tokens, temperature), prompts))
        elapsed = max(row[1] for row in rows) - min(row[0] for row in rows)
        key = f"users {len(prompts)} temperature {temperature:g}"
        self.speeds.setdefault(key, []).append(round(sum(row[2] for row in rows) / elapsed, 1))
        if temperature == 0:
            self.outputs.setdefault(key, []).extend(row[3] for row in rows)


def whole_trace(folder: Path, limit_s: float) -> Path | None:
    """The first trace in a folder once it stopped growing; None if there is none in so many seconds."""
    waited, size = time.perf_counter(), -1
    while time.perf_counter() - waited < limit_s:
        traces = sorted(folder.rglob("*.trace.json*"))
        if traces and traces[0].stat().st_size == size > 0:
            return traces[0]
        size = traces[0].stat().st_size if traces else -1
        time.sleep(1.0)
    return None


def made_up_prompts(args: argparse.Namespace) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(*VOCAB) for _ in range(args.input)] for _ in range(max(args.users) * args.rounds)]


def wait_for(file: Path | None) -> None:
    """Say that the servers are up, and return once the file exists; at once without one."""
    if file is None:
        return
    print("up", flush=True)
    while not file.exists():
        time.sleep(0.2)


def measure(arms: list[Arm], prompts: list[list[int]], args: argparse.Namespace) -> None:
    """Every arm in turn, round after round, each with the same prompts."""
    for arm in arms:
        for temperature in args.temperatures:
            arm.stream(prompts[0][:64], 64, temperature)
    for users in args.users:
        for temperature in args.temperatures:
            for turn in range(args.rounds):
                for arm in arms if turn % 2 == 0 else reversed(arms):
                    arm.measure(prompts[turn * users : (turn + 1) * users], args.output, temperature)


def report(arms: list[Arm], args: argparse.Namespace) -> dict[str, Any]:
    """What was measured, and each arm's speed over that of the first arm that simulates what it does."""
    rows = []
    for arm in arms:
        first = next(other for other in arms if other.simulates == arm.simulates)
        medians = {key: statistics.median(speeds) for key, speeds in arm.speeds.items()}
        rows.append(
            {
                "arm": arm.name,
                "environ": arm.environ,
                "flags": arm.flags,
                "start_s": arm.start_s,
                "tokens_per_s": arm.speeds,
                "median": medians,
                "profile": arm.profile,
                "compared_with": first.name,
                "speed_over_it": {
                    key: round(value / statistics.median(first.speeds[key]), 3) for key, value in medians.items()
                },
                "same_output": {
                    key: [ids == other for ids, other in zip(found, first.outputs[key], strict=True)]
                    for key, found in arm.outputs.items()
                },
            }
        )
    command = [Path(word).name if word.startswith("/") else word for word in sys.argv]
    return {"command": command, "model": Path(args.model).name, "arms": rows}


def looked_into(arms: list[Arm], names: list[str]) -> list[Arm]:
    """The arms of these names, or all; SystemExit if a name is none's."""
    if unknown := set(names) - {arm.name for arm in arms}:
        raise SystemExit(f"--look: no arm is called {', '.join(sorted(unknown))}")
    return [arm for arm in arms if not names or arm.name in names]


def write(arms: list[Arm], args: argparse.Namespace) -> dict[str, Any]:
    found = report(arms, args)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", help="where the model does not bring its own")
    parser.add_argument("--arm", action="append", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--users", type=int, nargs="+", default=[1])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--port", type=int, default=31_000, help="of the first server; the others lie 100 apart")
    parser.add_argument("--start-s", type=float, default=300)
    parser.add_argument("--logs", default=".")
    parser.add_argument("--profile", type=int, default=0, help="steps to trace of each server, after it is timed")
    parser.add_argument("--look", nargs="+", default=[], metavar="ARM", help="with --profile: of these arms only")
    parser.add_argument("--hold", type=Path, metavar="FILE", help="measure once this file exists")
    parser.add_argument("--py-spy", default="", help="with --profile: this py-spy samples the scheduler's host time")
    parser.add_argument("--server", nargs=argparse.REMAINDER, default=[], help="last: flags of every server")
    args = parser.parse_args()
    arms = [Arm.parse(text, args.port + 100 * index) for index, text in enumerate(args.arm)]
    server_client.different_names(parser, [arm.name for arm in arms])
    looked_into(arms, args.look)
    since = time.perf_counter()
    try:
        for arm in arms:
            arm.start(args)
        for arm in arms:
            arm.wait(since, args.start_s)
        wait_for(args.hold)
        prompts = made_up_prompts(args)
        measure(arms, prompts, args)
        found = write(arms, args)
        if args.profile:
            for arm in looked_into(arms, args.look):
                arm.look_inside(prompts[0], args)
            found = write(arms, args)
    finally:
        for arm in arms:
            arm.stop()
    for row in found["arms"]:
        print(
            json.dumps({key: value for key, value in row.items() if key not in ("environ", "tokens_per_s", "profile")})
        )


if __name__ == "__main__":
    main()
