"""Real text through running servers: greedy answers one at a time, sampled answers several at a time.

    python tools/compare_answers.py --server base=http://127.0.0.1:31000 --server plugin=... --server target=... \\
        --prompts gsm8k=gsm8k.jsonl mt-bench=mt-bench.jsonl --again base --out FOLDER

Greedy answers are computed in a batch of one, so that each server runs the same shapes, and compared id for id with the
first server's; where they differ, that one scores how near a tie it was. Sampled answers are compared as statistics:
accepted length, length of the answer, answers with a boxed number and, where the prompts have an ``answer``, those
that are right. ``--again`` samples a server a second time, with other random numbers: the noise of the comparison.
Answers are written as they come, and ``--report-only`` compares those that there are.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from prompt_files import prompts_argument, read_prompts
from server_client import (
    Server,
    ServerError,
    call,
    chat,
    different_names,
    first_difference,
    margin,
    server_argument,
)

_BOXED = re.compile(r"\\boxed\{([^}]*)\}")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Prompt:
    """A prompt with the set it is from, and the right number where it is known."""

    name: str
    text: str
    answer: str | None


def set_argument(text: str) -> tuple[str, Path]:
    """A set of prompts of a command line, ``NAME=FILE``."""
    name, _, file = text.partition("=")
    return name, prompts_argument(file)


def prompts_of(sets: Sequence[tuple[str, Path]], count: int) -> list[Prompt]:
    """The first ``count`` prompts of each named file; of each the first turn."""
    return [
        Prompt(name, chat(row["turns"][0]), row.get("answer"))
        for name, file in sets
        for row in read_prompts(file)[:count]
    ]


def last_number(text: str) -> str | None:
    """The number that an answer gives: the boxed one, or else the last of the text."""
    boxed = _BOXED.findall(text)
    numbers = _NUMBER.findall(boxed[-1] if boxed else text)
    return numbers[-1].replace(",", "").removesuffix(".0").removesuffix(".00") if numbers else None


def generate(server: Server, prompt: Prompt, sampling: dict[str, Any]) -> dict[str, Any]:
    """An answer, as a row of the results; ServerError if the server gave it up."""
    reply = call(server, "/generate", {"text": prompt.text, "sampling_params": sampling})
    meta = reply["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        raise ServerError(f"/generate of {server.name}: {meta['finish_reason']}")
    return {
        "set": prompt.name,
        "ids": reply["output_ids"],
        "tokens": meta["completion_tokens"],
        "verifies": meta.get("spec_verify_ct", 0),
        "boxed": bool(_BOXED.search(reply["text"])),
        "right": None if prompt.answer is None else last_number(reply["text"]) == prompt.answer,
    }


def answer_all(server: Server, prompts: list[Prompt], sampling: dict[str, Any], users: int, file: Path) -> None:
    """Answers of one server, ``users`` prompts at a time, written to ``file`` in the order of the prompts."""
    with ThreadPoolExecutor(users) as pool, file.open("w") as out:
        for row in pool.map(lambda prompt: generate(server, prompt, sampling), prompts):
            out.write(json.dumps(row) + "\n")
            out.flush()


def statistics(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over answers, each with its standard error."""
    found: dict[str, Any] = {"answers": len(rows)}
    rated = [row for row in rows if row["verifies"]]
    columns: dict[str, list[float]] = {
        "accepted_length": [row["tokens"] / row["verifies"] for row in rated],
        "tokens": [row["tokens"] for row in rows],
        "boxed": [float(row["boxed"]) for row in rows],
        "right": [float(row["right"]) for row in rows if row["right"] is not None],
    }
    for name, values in columns.items():
        if len(values) > 1:
            found[name] = [round(fmean(values), 4), round(stdev(values) / sqrt(len(values)), 4)]
    return found


def distance(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Difference of the means of two statistics in standard errors of that difference."""
    found = {}
    for name in one.keys() & other.keys() - {"answers"}:
        error = sqrt(one[name][1] ** 2 + other[name][1] ** 2)
        gap = abs(one[name][0] - other[name][0])
        found[name] = round(gap / error, 2) if error else (0.0 if not gap else float("inf"))
    return dict(sorted(found.items()))


def differences(
    reference: Server, prompts: list[Prompt], wanted: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Where greedy answers part from the reference's, each with the reference's margin there."""
    found = []
    for index, (prompt, row, other) in enumerate(zip(prompts, rows, wanted, strict=False)):  # one may not be done
        at = first_difference(row["ids"], other["ids"])
        if at is not None:
            try:
                scored = margin(reference, prompt.text, other["ids"], row["ids"], at)
            except Exception as error:  # the reference may be gone by now: the answers are still worth their report
                scored = {"position": at, "margin": None, "unscored": f"{type(error).__name__}: {error}"[:200]}
            found.append({"prompt": index, "set": prompt.name, "of": len(other["ids"])} | scored)
    return found


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def report(servers: list[Server], prompts: list[Prompt], args: argparse.Namespace) -> dict[str, Any]:
    """Both comparisons from the files that are there; an arm whose file is missing did not finish."""
    reference = servers[0]
    found: dict[str, Any] = {"prompts": len(prompts), "tokens": args.tokens, "reference": reference.name, "arms": {}}
    names = [server.name for server in servers] + [f"{name} again" for name in args.again]
    greedy = {name: args.out / f"{name}.greedy.jsonl" for name in names}
    for name in names:
        arm: dict[str, Any] = {}
        if greedy[name].exists():
            rows = read(greedy[name])
            arm["greedy"] = statistics(rows)
            if name != reference.name and greedy[reference.name].exists():
                arm["differences"] = differences(reference, prompts, read(greedy[reference.name]), rows)
        for kind in sorted({prompt.name for prompt in prompts}):
            file = args.out / f"{name}.sampled.jsonl"
            if file.exists():
                arm[f"sampled {kind}"] = statistics([row for row in read(file) if row["set"] == kind])
        first = found["arms"].get(reference.name, arm)
        arm["standard_errors_from_reference"] = {
            key: distance(arm[key], first[key]) for key in arm if key.startswith("sampled") and key in first
        }
        found["arms"][name] = arm
    return found


def table(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = ["| arm | greedy answers | differ | near ties | not scored | least near (nats) |", "|---" * 6 + "|"]
    for name, arm in found["arms"].items():
        apart = arm.get("differences")
        scored = [row["margin"] for row in apart or [] if row["margin"] is not None]
        ties = sum(row.get("near_tie", False) for row in apart or [])
        unscored = sum("unscored" in row for row in apart or [])
        cells = [""] * 4 if apart is None else [len(apart), ties, unscored, max(scored, default="")]
        lines.append(f"| {name} | {arm.get('greedy', {}).get('answers', 0)} | " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "| arm, temperature 1 | accepted length | tokens | boxed | right | greatest distance |",
        "|---" * 6 + "|",
    ]
    for name, arm in found["arms"].items():
        for key in filter(lambda key: key.startswith("sampled"), arm):
            cells = [f"{arm[key][of][0]} ± {arm[key][of][1]}" if of in arm[key] else "" for of in _COLUMNS]
            far = max(arm["standard_errors_from_reference"].get(key, {}).values(), default="")
            lines.append(f"| {name}, {key.removeprefix('sampled ')} | " + " | ".join([*cells, str(far)]) + " |")
    return "\n".join(lines) + "\n"


_COLUMNS = ("accepted_length", "tokens", "boxed", "right")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=server_argument, action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--prompts", type=set_argument, nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--count", type=int, default=200, help="prompts of a file")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--users", type=int, default=4, help="sampled requests at a time")
    parser.add_argument("--again", nargs="*", default=[], metavar="NAME", help="sample these servers twice")
    parser.add_argument("--greedy-only", action="store_true")
    parser.add_argument("--report-only", action="store_true", help="compare the answers that --out holds")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    names = [server.name for server in args.server]
    different_names(parser, names)
    if unknown := sorted(set(args.again) - set(names)):
        parser.error(f"--again names no server: {', '.join(unknown)}; there are {', '.join(names)}")
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = prompts_of(args.prompts, args.count)
    if not args.report_only:  # an earlier run's answers are not this one's
        for name in [*names, *(f"{name} again" for name in args.again)]:
            for kind in ("greedy", "sampled"):
                (args.out / f"{name}.{kind}.jsonl").unlink(missing_ok=True)

    def work(server: Server) -> None:
        greedy: dict[str, Any] = {"max_new_tokens": args.tokens, "temperature": 0.0}
        answer_all(server, prompts, greedy, 1, args.out / f"{server.name}.greedy.jsonl")
        for name in [] if args.greedy_only else [server.name] + [f"{again} again" for again in args.again]:
            if name.split(" ")[0] == server.name:
                answer_all(
                    server, prompts, greedy | {"temperature": 1.0}, args.users, args.out / f"{name}.sampled.jsonl"
                )

    failed = 0
    with ThreadPoolExecutor(len(args.server)) as pool:
        running = {} if args.report_only else {server.name: pool.submit(work, server) for server in args.server}
        for name, one in running.items():
            if raised := one.exception():
                failed += 1
                print(f"server {name!r}: {type(raised).__name__}: {raised}", file=sys.stderr)
    found = report(args.server, prompts, args)
    (args.out / "answers.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "answers.md").write_text(table(found))
    print(table(found))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
