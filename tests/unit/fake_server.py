"""A server that answers as SGLang's HTTP API does, from a function of the prompt: for the tools' tests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str], list[int]]


def letters(text: str) -> list[int]:
    """An answer that depends on the whole prompt."""
    return [(sum(map(ord, text)) + 7 * step) % 1000 for step in range(24)]


@dataclass
class FakeServer:
    """What the server does, and what it saw."""

    answer: Answer = letters
    step_s: float = 0.001
    held_slots: int = 0
    fails: bool = False
    publishes: bool = True  # its load, again and again
    ranks: int = 1
    fails_aborts: bool = False
    in_pieces: bool = False  # ids of an event are those since the last
    gives_up: bool = False  # every answer, as when the pool is full
    url: str = ""
    seen: list[dict[str, Any]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    gone: int = 0  # clients that closed the connection

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Chunks of two tokens, as far as ``max_new_tokens`` says."""
        ids = self.answer(body.get("text") or str(body["input_ids"]))[: body["sampling_params"]["max_new_tokens"]]
        for done in [*range(2, len(ids), 2), len(ids)]:
            time.sleep(self.step_s)
            meta = {"prompt_tokens": 5, "completion_tokens": done, "spec_verify_ct": (done + 1) // 2}
            reason: dict[str, Any] | None = {"type": "abort"} if body.get("rid") in self.aborted else None
            if self.gives_up:
                reason = {"type": "abort", "message": "out of memory", "status_code": 500}
            if done == len(ids):
                reason = reason or {"type": "length"}
            yield {
                "text": f"\\boxed{{{ids[0]}}}",
                "output_ids": ids[done - 2 if self.in_pieces else 0 : done],
                "meta_info": meta | {"finish_reason": reason},
            }
            if reason:
                return


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def _send(self, body: Any, status: int = 200) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        if self.path != "/v1/loads":
            return self._send({})
        load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": self.fake.held_slots}
        load |= {"max_total_num_tokens": 100, "timestamp": time.time() if self.fake.publishes else 1.0}
        return self._send({"loads": [load] * self.fake.ranks})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.fake.seen.append(body | {"path": self.path})
        if self.path == "/abort_request":
            if self.fake.fails_aborts:
                return self._send({"error": "no"}, 500)
            self.fake.aborted.add(body["rid"])
        if self.path == "/tokenize":
            return self._send({"tokens": [1, 2]})
        if self.path != "/generate":
            return self._send({})
        if self.fake.fails:
            return self._send({"error": "broken"}, 500)
        try:
            return self._generate(body)
        except (BrokenPipeError, ConnectionResetError):
            self.fake.gone += 1
            return None

    def _generate(self, body: dict[str, Any]) -> None:
        if "token_ids_logprob" in body:  # the wanted token is best, the other 0.25 behind
            wanted, found = body["token_ids_logprob"]
            meta = {"output_top_logprobs": [[[-0.5, wanted, None]]]}
            meta["output_token_ids_logprobs"] = [[[-0.5, wanted, None], [-0.75, found, None]]]
            return self._send({"meta_info": meta})
        if not body.get("stream"):
            return self._send(list(self.fake.events(body))[-1])
        self.send_response(200)
        self.end_headers()
        for event in self.fake.events(body):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")
        return None


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 64  # more than the users of a test, who connect at once


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """The server on a free port while the block runs."""
    handler = type("Handler", (_Handler,), {"fake": fake})
    with _HttpServer(("127.0.0.1", 0), handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
