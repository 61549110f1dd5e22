"""SGLang's own HTTP routes over a made-up tokenizer manager, as a process of its own: no model, no scheduler.

A process, since a test's that has imported these routes crashes when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from server_client import Server, call

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import FlushCacheReqOutput, GenerateReqInput
    from sglang.srt.managers.load_snapshot import LoadSnapshot


class Manager:
    """Stands in for the tokenizer manager: answers count up, one id every few milliseconds."""

    is_generation = True
    gracefully_exit = False
    metrics_collector = None

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(
            encode=lambda text, add_special_tokens: [len(text), int(add_special_tokens)], model_max_length=100
        )
        self.request_logger = SimpleNamespace(log_requests=False)
        self.server_args = SimpleNamespace()
        self.model_config = SimpleNamespace(context_len=100)
        self.served_model_name = "made"
        self.clear()

    def clear(self, busy: int = 0, used: int = 0) -> None:
        """Forget what was asked; ``busy`` requests run and ``used`` slots are held from now on."""
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.flushes: list[float | None] = []
        self.busy, self.used = busy, used

    async def generate_request(self, obj: GenerateReqInput, request: Any) -> AsyncIterator[dict[str, Any]]:
        obj.normalize_batch_and_arguments()
        self.asked.append({"rid": obj.rid, "input_ids": obj.input_ids})
        wanted = obj.sampling_params["max_new_tokens"]
        for done in range(1, wanted + 1):
            await asyncio.sleep(0.002)
            aborted = any(str(obj.rid).startswith(rid) for rid in self.aborted)
            reason = {"type": "abort", "message": "Abort", "status_code": None, "err_type": None} if aborted else None
            if done == wanted:
                reason = reason or {"type": "length", "length": wanted}
            meta = {"id": obj.rid, "finish_reason": reason, "prompt_tokens": 3, "completion_tokens": done}
            if obj.return_logprob:
                meta["output_top_logprobs"] = [[[-0.1, 7, None], [-0.4, 8, None]]]
                meta["output_token_ids_logprobs"] = [[[-0.1 * one, one, None] for one in obj.token_ids_logprob or []]]
            if obj.stream or reason:
                yield {"text": "", "output_ids": list(range(done)), "meta_info": meta | {"spec_verify_ct": done}}
            if reason:
                return
            if not obj.stream and await request.is_disconnected():
                raise ValueError(f"Request is disconnected from the client side (type 3). Abort request {obj.rid=}")

    def abort_request(self, rid: str, abort_all: bool) -> None:
        self.aborted.append(rid)

    def create_abort_task(self, obj: GenerateReqInput) -> None:
        return None

    async def get_loads(self, include: Any, dp_rank: Any) -> list[LoadSnapshot]:
        from sglang.srt.managers.load_snapshot import LoadSnapshot

        return [
            LoadSnapshot(
                timestamp=time.time(), num_running_reqs=self.busy, num_used_tokens=self.used, max_total_num_tokens=64
            )
        ]

    async def flush_cache(self, timeout_s: float | None) -> FlushCacheReqOutput:
        from sglang.srt.managers.io_struct import FlushCacheReqOutput

        self.flushes.append(timeout_s)
        return FlushCacheReqOutput(success=not self.busy, message="busy")


def serve(port_file: Path) -> None:
    """Serve the routes on a free port, which is written to a file, until the process is killed."""
    import uvicorn
    from sglang.srt.entrypoints import http_server, v1_loads
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize

    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", force=True)  # as SGLang's own
    made = Manager()
    app: Any = http_server.app
    http_server.set_global_state(SimpleNamespace(tokenizer_manager=made))
    app.state.openai_serving_tokenize = OpenAIServingTokenize(made)
    vars(v1_loads).update(_accelerator_name=lambda: None, _num_accelerators_per_dp_rank=lambda: 1)

    @app.post("/made")  # type: ignore[untyped-decorator]
    async def made_up(change: dict[str, int]) -> dict[str, Any]:
        found = {"asked": made.asked, "aborted": made.aborted, "flushes": made.flushes}
        if change:
            made.clear(**change)
        return found

    class Announced(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            port_file.with_suffix(".part").write_text(str(self.servers[0].sockets[0].getsockname()[1]))
            port_file.with_suffix(".part").replace(port_file)

    Announced(uvicorn.Config(app, port=0, lifespan="off", log_config=None)).run()


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """The routes in a process of their own while the block runs; its log is the server's."""
    port_file, log = folder / "port", folder / "log"
    with log.open("wb") as file:
        command = [sys.executable, "-W", "ignore", __file__, str(port_file)]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(command, env=environ, stdout=file, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 120
        while not port_file.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield Server("made", f"http://127.0.0.1:{port_file.read_text()}", str(log))
    finally:
        process.kill()
        process.wait()


def state(server: Server) -> dict[str, Any]:
    """What the server was asked since it was last cleared."""
    found: dict[str, Any] = call(server, "/made", {})
    return found


def clear(server: Server, busy: int = 0, used: int = 0) -> dict[str, Any]:
    """The same, and forget it; from now on so many requests run and slots are held."""
    found: dict[str, Any] = call(server, "/made", {"busy": busy, "used": used})
    return found


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
