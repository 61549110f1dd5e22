"""What the tools that compare running servers share: requests to SGLang's HTTP API, and how two answers differ.

Standard library only. Used by ``compare_servers``, ``soak_servers``, ``compare_answers`` and ``run_server_kits``.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

#: The system turn of the demo target, as its tokenizer has it (a test compares them: importing that one loads torch).
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
#: Log probabilities (nats) of a position by two bf16 paths of SGLang lie this close: its own kit ``SpecLogprobKit``
#: allows it between decode and prefill. So two tokens whose distance is less may change places.
NEAR_TIE = 0.5
#: SGLang's log lines have no level, so errors are known by their words.
_ERROR = re.compile(
    r"Traceback \(most recent|\bERROR\b|\bCRITICAL\b|Exception\b|leak detected|[Ww]atchdog|[Ss]igquit|Error:"
    r"|Health check failed|load snapshot publish failed"
)
#: What SGLang logs with ``Error:`` when a client goes away, as the soak's clients do: no fault of the server.
_CLIENT_LEFT = "Request is disconnected from the client side"


@dataclass(frozen=True)
class Server:
    """A running server: ``NAME=URL`` or ``NAME=URL,LOGFILE``."""

    name: str
    url: str
    log: str = ""

    @classmethod
    def parse(cls, text: str) -> Server:
        name, equals, rest = text.partition("=")
        url, _, log = rest.partition(",")
        if not equals or not urlsplit(url).port:
            raise ValueError(f"{text!r} is not NAME=http://HOST:PORT[,LOGFILE]")
        return cls(name, url.rstrip("/"), log)

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)


def server_argument(text: str) -> Server:
    """A server of a command line, for ``argparse``, which says only of this kind of error what is wrong."""
    try:
        return Server.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def different_names(parser: ArgumentParser, names: Sequence[str]) -> None:
    """Leave with a usage error if two servers have one name: their results would overwrite each other."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        parser.error(f"two servers are called {', '.join(twice)}: give each a name of its own")


class ServerError(RuntimeError):
    """A server answered with another status than 200, or did not finish an answer."""


def _open(server: Server, method: str, path: str, body: Any, timeout: float) -> http.client.HTTPConnection:
    connection = server.connect(timeout)
    text = None if body is None else json.dumps(body)
    connection.request(method, path, text, {} if body is None else {"Content-Type": "application/json"})
    return connection


def call(server: Server, path: str, body: Any = None, *, timeout: float = 120.0) -> Any:
    """One request: POST with a body, GET without. The JSON of the reply, or its text.

    Raises:
        ServerError: the status is not 200. OSError: no connection, or no reply in ``timeout`` seconds.
    """
    with closing(_open(server, "GET" if body is None else "POST", path, body, timeout)) as connection:
        reply = connection.getresponse()
        text = reply.read().decode()
        if reply.status != 200:
            raise ServerError(f"{path} of {server.name}: status {reply.status}: {text[:300]}")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def stream(server: Server, body: dict[str, Any], *, timeout: float = 120.0) -> Generator[dict[str, Any], None, None]:
    """The events of ``/generate``; closing the iterator closes the connection, as a client that goes away does."""
    connection = _open(server, "POST", "/generate", body | {"stream": True}, timeout)
    with closing(connection), connection.getresponse() as reply:  # the socket closes when both are closed
        if reply.status != 200:
            raise ServerError(f"/generate of {server.name}: status {reply.status}: {reply.read()[:300]!r}")
        for line in reply:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ServerError(f"/generate of {server.name}: {event['error']}")
                yield event


def chat(turn: str) -> str:
    """The demo target's chat format, open for the answer."""
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"


def load_of(server: Server) -> dict[str, Any]:
    """What the schedulers of a server last published, summed over its data-parallel ranks.

    ``busy`` counts requests that run or wait, ``used`` KV slots that are neither free nor evictable, ``pool`` all
    slots: 0 before a scheduler has published anything. ``published`` is the time of the oldest report.
    """
    ranks = call(server, "/v1/loads", timeout=30)["loads"]
    return {
        "busy": sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in ranks),
        "used": sum(rank["num_used_tokens"] for rank in ranks),
        "pool": sum(rank["max_total_num_tokens"] for rank in ranks),
        "published": min((rank["timestamp"] for rank in ranks), default=0.0),
    }


def wait_idle(server: Server, limit_s: float) -> dict[str, Any]:
    """Its load once no request runs or waits and no slot is used, or after ``limit_s`` seconds whatever it is then."""
    since = time.monotonic()
    while True:
        load = load_of(server)
        if not (load["busy"] or load["used"]) or time.monotonic() - since > limit_s:
            return load
        time.sleep(0.5)


def flush(server: Server, wait_s: int = 30) -> None:
    """Empty the prefix cache once the server is idle; ServerError if it is not idle within ``wait_s`` seconds."""
    call(server, f"/flush_cache?timeout={wait_s}", {}, timeout=wait_s + 30)


def settle(server: Server, limit_s: float) -> dict[str, Any]:
    """Wait until a server is idle, and say what its KV pool then holds, before and after its prefix cache is flushed.

    ``used`` counts slots that are neither free nor evictable, so an idle server without a leak has 0; ``flushed`` is
    the same after the flush, None if the scheduler publishes nothing after it. ``ok`` is False too if the server does
    not become idle in ``limit_s`` seconds.
    """
    load = wait_idle(server, limit_s)
    found = {"running_or_waiting": load["busy"], "used": load["used"], "pool": load["pool"]}
    if load["busy"]:
        return found | {"ok": False, "why": f"still busy after {limit_s:g} s"}
    try:
        flush(server)
    except ServerError as error:
        return found | {"flushed": None, "ok": False, "why": str(error)}
    since = time.monotonic()
    while True:
        time.sleep(1.0)  # the idle scheduler checks its pools and publishes its load after the flush
        after = load_of(server)
        if after["published"] != load["published"]:
            break
        if time.monotonic() - since > limit_s:
            return found | {"flushed": None, "ok": False, "why": "the load is not published any more"}
    found |= {"pool": after["pool"], "flushed": after["used"]}
    return found | {"ok": found["pool"] > 0 and found["used"] == 0 and found["flushed"] == 0}


def log_errors(path: str, start: int = 0) -> list[str]:
    """Lines of a log, from byte ``start`` on, that tell of an error."""
    if not path:
        return []
    with Path(path).open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    return [line[:400] for line in lines if _ERROR.search(line) and _CLIENT_LEFT not in line]


def log_size(path: str) -> int:
    return Path(path).stat().st_size if path else 0


def first_difference(found: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Index of the first id that differs (the shorter's length if one continues the other), None if equal."""
    for index, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if one != other:
            return index
    return None if len(found) == len(wanted) else min(len(found), len(wanted))


def margin(server: Server, text: str, wanted: list[int], found: list[int], position: int) -> dict[str, Any]:
    """How near to a tie a server holds two answers at their first difference.

    The server scores the prompt and the common ids by a prefill of its own. ``margin``: distance (nats) between the
    log probabilities of its best token and the less likely one of the two; None if one answer ends there.
    """
    row: dict[str, Any] = {"position": position, "wanted": wanted[position : position + 1]}
    row["found"] = found[position : position + 1]
    if not (row["wanted"] and row["found"]):
        return row | {"margin": None, "near_tie": False}
    probe = [*row["wanted"], *row["found"]]
    prompt = call(server, "/tokenize", {"prompt": text, "add_special_tokens": True})["tokens"]
    body = {
        "input_ids": prompt + wanted[:position],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "token_ids_logprob": probe,
    }
    meta = call(server, "/generate", body)["meta_info"]
    best = meta["output_top_logprobs"][0][0][0]
    of = {entry[1]: entry[0] for entry in meta["output_token_ids_logprobs"][0]}
    distance = best - min(of[token] for token in probe)
    return row | {"margin": round(distance, 4), "near_tie": distance <= NEAR_TIE}


def chance_of_more(found: int, of_found: int, noise: int, of_noise: int) -> float:
    """Chance of at least ``found`` mismatches among ``of_found`` answers if they were as likely as the noise's.

    One-sided and exact: given all mismatches, those of one arm are hypergeometric (Fisher).
    """
    total, drawn = of_found + of_noise, found + noise
    ways = sum(comb(of_found, k) * comb(of_noise, drawn - k) for k in range(found, min(drawn, of_found) + 1))
    return ways / comb(total, drawn)
