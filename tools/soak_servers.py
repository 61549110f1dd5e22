"""Soak running servers with the same traffic, and compare what they answered.

    python tools/soak_servers.py --server base=http://127.0.0.1:31000,base.log --server base2=... --server plugin=... \\
        --prompts gsm8k.jsonl mt-bench.jsonl --minutes 10 --users 16 --out FOLDER

The first server is the reference. Every user sends one request after the other, as a seeded plan says: lengths,
temperatures (greedy and sampled rows share batches), streaming or not, shared prefixes, clients that go away, aborts by
id, and from user 0 what a plugin leaves to the engine (grammar, log probabilities, penalties). The time is cut into
rounds; after each the server must come to rest with every KV slot free.

At temperature 0 an engine's answer depends on the batch it is computed in: another batch size chooses other GEMM
kernels, and a near tie then turns. So a second server like the reference (``--noise``) gives the mismatches that chance
makes, and the reference scores each mismatch: a tie within ``NEAR_TIE`` or not. An arm passes if no more of its answers
differ than of the noise's (exact one-sided test at 1 %) and every difference is a near tie.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from prompt_files import first_turns, prompts_argument
from server_client import (
    Server,
    call,
    chance_of_more,
    chat,
    different_names,
    first_difference,
    log_errors,
    log_size,
    margin,
    server_argument,
    settle,
    stream,
)

#: Chance below which more mismatches than the noise's are no chance.
SIGNIFICANT = 0.01
TIMEOUT_S = 120.0  # of a request; a server that hangs longer is an error
#: Longest text before a prompt, some 3,000 tokens: with the answer it has to fit the context, or the server refuses it.
_LONGEST = 12_000
_NEW_TOKENS = (1, 2, 8, 32, 64, 128, 256, 512)
_JSON = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
#: What a plugin leaves to the engine for a step: fields of the request, and of its sampling parameters.
UNUSUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "json": ({}, {"json_schema": _JSON}),
    "logprob": ({"return_logprob": True, "top_logprobs_num": 2}, {}),
    "penalty": ({}, {"frequency_penalty": 0.5}),
    "bias": ({}, {"logit_bias": {"100": 2.0}}),
}


@dataclass(frozen=True)
class Ask:
    """A request of the plan."""

    user: int
    index: int
    text: str
    sampling: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    kind: str = "plain"
    streams: bool = False
    abort: str = ""  # "disconnect" or "request": how the client ends it
    abort_after: float = 0.0  # tokens if it streams and disconnects, else seconds
    think_s: float = 0.0

    @property
    def greedy(self) -> bool:
        return float(self.sampling["temperature"]) == 0


def ask(seed: int, user: int, index: int, turns: Sequence[str]) -> Ask:
    """Request ``index`` of ``user``: the same for every server, whatever the others do."""
    draw = random.Random(f"{seed}/{user}/{index}")
    text = chat(draw.choice(turns))
    shape = draw.random()
    if shape < 0.3:  # one of four shared prefixes
        first = draw.randrange(4) * 5
        text = "\n\n".join(turns[first % len(turns) : first % len(turns) + 5])[:_LONGEST] + "\n\n" + text
    elif shape < 0.4:
        text = "\n\n".join(draw.choices(turns, k=draw.randint(10, 25)))[:_LONGEST] + "\n\n" + text
    sampling: dict[str, Any] = {
        "max_new_tokens": draw.choices(_NEW_TOKENS, weights=(2, 2, 4, 10, 20, 20, 10, 3))[0],
        "temperature": draw.choices((0.0, 0.7, 1.0), weights=(6, 2, 2))[0],
    }
    if sampling["temperature"] and draw.random() < 0.3:
        sampling |= draw.choice([{"top_p": 0.9}, {"top_k": 40}, {"top_k": 20, "top_p": 0.95}])
    ends: list[dict[str, Any]] = [{}, {"stop": ["\n\n", "The"]}, {"ignore_eos": True}]
    sampling |= draw.choices(ends, weights=(8, 1, 1))[0]
    kind, fields = "plain", dict[str, Any]()
    if user == 0 and index % 3 == 2:
        kind = draw.choice(sorted(UNUSUAL))
        fields, more = UNUSUAL[kind]
        sampling |= more | {"max_new_tokens": min(32, sampling["max_new_tokens"])}
    streams = draw.random() < 0.5
    abort, after = "", 0.0
    if sampling["max_new_tokens"] >= 64 and draw.random() < 0.15:
        abort = draw.choice(("disconnect", "request"))
        after = draw.randint(1, 40) if streams and abort == "disconnect" else draw.uniform(0.02, 0.6)
    think = draw.choices((0.0, draw.uniform(0, 0.4), draw.uniform(1, 3)), weights=(6, 3, 1))[0]
    return Ask(user, index, text, sampling, fields, kind, streams, abort, after, think)


def send(server: Server, one: Ask, turn: str) -> dict[str, Any]:
    """One request to its end; what came of it, as a row of the raw results."""
    rid = request_id(turn, one)
    body = {"text": one.text, "sampling_params": one.sampling, "rid": rid, **one.fields}
    row = {"user": one.user, "index": one.index, "kind": one.kind, "greedy": one.greedy}
    failures: list[Exception] = []
    timer = threading.Timer(one.abort_after, _abort, (server, rid, failures))
    if one.abort == "request":
        timer.start()
    try:
        found = _outcome(one, _streamed(server, one, body) if one.streams else _whole(server, one, body))
    except Exception as error:
        failures.append(error)
    finally:
        if one.abort == "request":
            timer.cancel()
            timer.join()
    if failures:
        found = {"outcome": "error", "error": f"{type(failures[0]).__name__}: {failures[0]}"[:300]}
    return row | found


def request_id(turn: str, one: Ask) -> str:
    """An id that no other request's id begins with: the scheduler aborts every request whose id begins with the one it
    is given, and it aborts for a client that went away seconds later, when the user's next requests run."""
    return f"{turn}-{one.user:04}-{one.index:06}"


def _outcome(one: Ask, last: dict[str, Any] | None) -> dict[str, Any]:
    """What the end of an answer says, None standing for a client that left."""
    if last is None:
        return {"outcome": "aborted"}
    meta = last["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":  # what a client aborts has no status code, what the server gives up has one
        aborted = one.abort == "request" and reason.get("status_code") is None
        return {"outcome": "aborted" if aborted else "error", "error": str(reason)[:300]}
    ids, tokens = last["output_ids"], meta["completion_tokens"]
    if len(ids) != tokens:  # --incremental-streaming-output sends them in pieces
        raise RuntimeError(f"the last event has {len(ids)} of {tokens} ids")
    found = {"outcome": "completed", "ids": ids, "tokens": tokens, "prompt": meta["prompt_tokens"]}
    return found | {"cached": meta.get("cached_tokens", 0), "verifies": meta.get("spec_verify_ct", 0)}


def _abort(server: Server, rid: str, failures: list[Exception]) -> None:
    try:
        call(server, "/abort_request", {"rid": rid}, timeout=30)
    except Exception as error:  # in a thread of its own, where nobody would see it
        failures.append(error)


def _streamed(server: Server, one: Ask, body: dict[str, Any]) -> dict[str, Any] | None:
    last: dict[str, Any] | None = None
    events = stream(server, body, timeout=TIMEOUT_S)
    try:
        for last in events:
            if one.abort == "disconnect" and last["meta_info"]["completion_tokens"] >= one.abort_after:
                return None
    finally:
        events.close()
    if last is None:
        raise RuntimeError("the stream had no event")
    if not last["meta_info"].get("finish_reason"):
        raise RuntimeError("the stream ended before the answer did")
    return last


def _whole(server: Server, one: Ask, body: dict[str, Any]) -> dict[str, Any] | None:
    goes_away = one.abort == "disconnect"
    try:
        found: dict[str, Any] = call(server, "/generate", body, timeout=one.abort_after if goes_away else TIMEOUT_S)
    except TimeoutError:
        if not goes_away:
            raise
        return None
    return found


def soak(server: Server, turns: Sequence[str], plan: dict[str, Any], out: Path) -> dict[str, Any]:
    """All users of one server, round after round; writes its rows as it goes and returns what was seen between."""
    start = log_size(server.log)
    rests: list[dict[str, Any]] = []
    progress = [0] * plan["users"]
    lock = threading.Lock()
    with (out / f"{server.name}.jsonl").open("w") as file:

        def serve_user(user: int, until: float) -> None:
            while time.monotonic() < until:
                one = ask(plan["seed"], user, progress[user], turns)
                row = send(server, one, plan["name"])
                progress[user] += 1
                with lock:
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                time.sleep(one.think_s if row["outcome"] != "error" else 1.0)

        for _ in range(plan["rounds"]):
            until = time.monotonic() + plan["round_s"]
            users = [threading.Thread(target=serve_user, args=(user, until)) for user in range(plan["users"])]
            for thread in users:
                thread.start()
            for thread in users:
                thread.join()
            try:
                rests.append(settle(server, 30))
            except Exception as error:
                rests.append({"ok": False, "why": f"{type(error).__name__}: {error}"[:300]})
            seen = {"server": asdict(server), "rests": rests, "log_errors": log_errors(server.log, start)}
            (out / f"{server.name}.rests.json").write_text(json.dumps(seen, indent=1) + "\n")
    return seen


def read_rows(path: Path) -> dict[tuple[int, int], dict[str, Any]]:
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return {(row["user"], row["index"]): row for row in rows}


def compare(
    rows: dict[tuple[int, int], dict[str, Any]], wanted: dict[tuple[int, int], dict[str, Any]]
) -> dict[str, Any]:
    """Greedy answers that both servers completed: how many, and where they differ."""
    both = [
        key
        for key, row in rows.items()
        if row["greedy"] and row["outcome"] == "completed" and wanted.get(key, {}).get("outcome") == "completed"
    ]
    found = {key: first_difference(rows[key]["ids"], wanted[key]["ids"]) for key in sorted(both)}
    where = [{"key": list(key), "position": at} for key, at in found.items() if at is not None]
    return {"compared": len(both), "compared_tokens": sum(len(wanted[key]["ids"]) for key in both), "mismatches": where}


def totals(rows: dict[tuple[int, int], dict[str, Any]]) -> dict[str, Any]:
    """What became of a server's requests, and the mean accepted length of those that were sampled and that were not."""
    done = [row for row in rows.values() if row["outcome"] == "completed"]
    found: dict[str, Any] = {"outcomes": dict(Counter(row["outcome"] for row in rows.values()))}
    found["kinds"] = dict(Counter(row["kind"] for row in done))
    found["tokens"] = sum(row["tokens"] for row in done)
    found["cached_prompt_tokens"] = sum(row["cached"] for row in done)
    for name, greedy in (("greedy", True), ("sampled", False)):
        rated = [row for row in done if row["greedy"] is greedy and row["verifies"]]
        verifies = sum(row["verifies"] for row in rated)
        found[f"accepted_{name}"] = round(sum(row["tokens"] for row in rated) / verifies, 3) if verifies else None
    found["errors"] = [row["error"] for row in rows.values() if row["outcome"] == "error"][:20]
    return found


def verdict(arm: dict[str, Any], noise: dict[str, Any] | None) -> list[str]:
    """Why an arm fails; empty when it passes."""
    why = []
    unhealthy = [rest for rest in arm["rests"] if not rest["ok"]]
    if unhealthy or not arm["rests"]:
        why.append(f"{len(unhealthy)} of {len(arm['rests'])} rests with KV slots held or the server not idle")
    if arm["log_errors"]:
        why.append(f"{len(arm['log_errors'])} error lines in the log")
    if arm["outcomes"].get("error"):
        why.append(f"{arm['outcomes']['error']} requests failed")
    if noise is None:
        return why
    apart = len(arm["mismatches"])
    arm["chance"] = chance_of_more(apart, arm["compared"], len(noise["mismatches"]), noise["compared"])
    if arm["chance"] < SIGNIFICANT:
        why.append(f"{apart} of {arm['compared']} answers differ, {len(noise['mismatches'])} of the noise's")
    far = [row for row in arm["mismatches"] if row.get("near_tie") is False]
    if far:
        why.append(f"{len(far)} differences are no near tie")
    unscored = [row["unscored"] for row in arm["mismatches"] if "unscored" in row]
    if unscored:
        why.append(f"{len(unscored)} differences could not be scored: {unscored[0]}")
    if not arm["compared"]:
        why.append("no answer to compare")
    return why


def judge(servers: list[Server], noise: str, turns: Sequence[str], plan: dict[str, Any], out: Path) -> dict[str, Any]:
    """Compare the raw rows in ``out`` with the first server's; the reference scores each difference."""
    reference = servers[0]
    wanted = read_rows(out / f"{reference.name}.jsonl")
    arms: dict[str, dict[str, Any]] = {}
    for server in servers:
        rows = read_rows(out / f"{server.name}.jsonl")
        arms[server.name] = totals(rows) | json.loads((out / f"{server.name}.rests.json").read_text())
        if server is reference:
            continue
        arm = arms[server.name] | compare(rows, wanted)
        for found in arm["mismatches"][: plan["margins"]]:
            key = (found["key"][0], found["key"][1])
            one = ask(plan["seed"], *key, turns)
            if one.kind == "plain":
                try:
                    found |= margin(reference, one.text, wanted[key]["ids"], rows[key]["ids"], found["position"])
                except Exception as error:
                    found["unscored"] = f"{type(error).__name__}: {error}"[:200]
        arms[server.name] = arm
    for server in servers:
        arm = arms[server.name]
        judged = server.name not in (reference.name, noise) and noise in arms
        arm["fails"] = verdict(arm, arms[noise] if judged else None)
    return {"plan": plan, "reference": reference.name, "noise": noise, "arms": arms}


def table(found: dict[str, Any]) -> str:
    """The result as Markdown."""
    names = list(found["arms"])
    rows: dict[str, Callable[[dict[str, Any]], Any]] = {
        "requests completed": lambda arm: arm["outcomes"].get("completed", 0),
        "aborted by the client": lambda arm: arm["outcomes"].get("aborted", 0),
        "failed": lambda arm: arm["outcomes"].get("error", 0),
        "tokens": lambda arm: f"{arm['tokens']:,}",
        "accepted length, greedy": lambda arm: arm["accepted_greedy"],
        "accepted length, sampled": lambda arm: arm["accepted_sampled"],
        "greedy answers compared": lambda arm: arm.get("compared", ""),
        "their tokens": lambda arm: f"{arm['compared_tokens']:,}" if "compared_tokens" in arm else "",
        "that differ": lambda arm: len(arm["mismatches"]) if "mismatches" in arm else "",
        "of them near ties": lambda arm: sum(bool(row.get("near_tie")) for row in arm.get("mismatches", [])),
        "of them not scored": lambda arm: sum("near_tie" not in row for row in arm.get("mismatches", [])),
        "chance of that many": lambda arm: f"{arm['chance']:.2g}" if "chance" in arm else "",
        "KV slots held at rest": lambda arm: [rest.get("used") for rest in arm["rests"]],
        "after a flush": lambda arm: [rest.get("flushed") for rest in arm["rests"]],
        "error lines in the log": lambda arm: len(arm["log_errors"]),
        "fails": lambda arm: "; ".join(arm["fails"]) or "no",
    }
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [
        f"| {name} | " + " | ".join(str(of(found["arms"][arm])) for arm in names) + " |" for name, of in rows.items()
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=server_argument, action="append", required=True, metavar="NAME=URL[,LOG]")
    parser.add_argument("--noise", default="base2", help="name of the server that is like the first")
    parser.add_argument(
        "--prompts", type=prompts_argument, nargs="+", required=True, help='JSON lines, {"turns": [...]}'
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--margins", type=int, default=100, help="most mismatches of an arm that are scored")
    parser.add_argument("--name", default="soak", help="first part of the request ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--judge-only", action="store_true", help="compare the raw results that --out holds")
    args = parser.parse_args(argv)
    names = [server.name for server in args.server]
    turns = first_turns(args.prompts)
    different_names(parser, names)
    if len(names) > 1 and args.noise not in names[1:]:
        parser.error(f"--noise {args.noise} is none of {', '.join(names[1:])}: without it no difference can be judged")
    if not turns:
        parser.error("the files of prompts are empty")
    missing = [server.log for server in args.server if server.log and not Path(server.log).is_file()]
    if missing and not args.judge_only:
        parser.error(f"no such log: {', '.join(missing)}")
    args.out.mkdir(parents=True, exist_ok=True)
    plan = {key: getattr(args, key) for key in ("minutes", "rounds", "users", "seed", "margins", "name")}
    plan["round_s"] = 60 * args.minutes / args.rounds
    if not args.judge_only:
        with ProcessPoolExecutor(len(args.server), mp_context=get_context("spawn")) as pool:
            running = [pool.submit(soak, server, turns, plan, args.out) for server in args.server]
            for one in running:
                one.result()
    found = judge(args.server, args.noise, turns, plan, args.out)
    (args.out / "soak.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "soak.md").write_text(table(found))
    print(table(found))
    return int(any(arm["fails"] for arm in found["arms"].values()))


if __name__ == "__main__":
    sys.exit(main())
