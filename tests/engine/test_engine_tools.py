"""The tools that talk to running servers, against SGLang's own HTTP routes: what is behind them is made up."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compare_answers
import engine_http
import pytest
import run_server_kits
import server_client
import soak_servers
from server_client import Server, ServerError
from sglang.api.v1.api_types import GenerateRequest
from sglang.srt.sampling.sampling_params import SamplingParams

TURNS = [f"question {number}" for number in range(40)]
VOCAB = 49_152


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with engine_http.running(tmp_path_factory.mktemp("http")) as server:
        yield server


@pytest.fixture
def server(routes: Server) -> Server:
    """SGLang's routes, as if nothing had been asked yet."""
    engine_http.clear(routes)
    return routes


def test_sglang_takes_every_request_that_a_soak_sends() -> None:
    kinds = set()
    for one in (soak_servers.ask(1, user, index, TURNS) for user in range(3) for index in range(150)):
        body = {"text": one.text, "sampling_params": one.sampling, "rid": "r", "stream": one.streams, **one.fields}
        GenerateRequest.from_json_value(json.loads(json.dumps(body)))
        SamplingParams(**one.sampling).verify(VOCAB)
        kinds.add(one.kind)
    assert kinds == {"plain", *soak_servers.UNUSUAL}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("abort", ["", "request", "disconnect"])
def test_a_request_ends_as_the_soak_wants_it(server: Server, streams: bool, abort: str) -> None:
    sampling = {"max_new_tokens": 5 if not abort else 2000, "temperature": 0.0}
    after = 3 if streams and abort == "disconnect" else 0.3
    one = soak_servers.Ask(1, 1, "x", sampling, streams=streams, abort=abort, abort_after=after)
    row = soak_servers.send(server, one, "t")
    assert row["outcome"] == ("aborted" if abort else "completed"), row
    if not abort:
        assert (row["ids"], row["tokens"], row["prompt"], row["verifies"]) == ([0, 1, 2, 3, 4], 5, 3, 5)
    seen = engine_http.state(server)
    assert seen["aborted"] == ([seen["asked"][0]["rid"]] if abort == "request" else [])


def test_a_client_that_left_is_no_error_of_the_log(server: Server) -> None:
    start = server_client.log_size(server.log)
    one = soak_servers.Ask(1, 1, "x", {"max_new_tokens": 2000, "temperature": 0.0}, abort="disconnect", abort_after=0.1)
    soak_servers.send(server, one, "t")
    until = time.monotonic() + 10
    text = ""
    while "disconnected from the client" not in text and time.monotonic() < until:
        time.sleep(0.05)
        text = Path(server.log).read_text()[start:]
    assert "[http_server] Error: Request is disconnected" in text
    assert server_client.log_errors(server.log, start) == []
    with pytest.raises(ServerError, match="status 400"):
        server_client.call(server, "/generate", {"sampling_params": {}})
    assert len(server_client.log_errors(server.log, start)) == 1


def test_a_server_is_at_rest_or_not(server: Server) -> None:
    found = server_client.settle(server, 0.1)
    assert found == {"running_or_waiting": 0, "used": 0, "pool": 64, "flushed": 0, "ok": True}
    assert engine_http.clear(server, used=5)["flushes"] == [30.0]
    assert server_client.settle(server, 0.1) == found | {"used": 5, "flushed": 5, "ok": False}
    engine_http.clear(server, busy=1)
    assert server_client.settle(server, 0.1)["why"] == "still busy after 0.1 s"
    with pytest.raises(ServerError, match="status 400: busy"):
        server_client.flush(server)


def test_the_reference_scores_a_difference(server: Server) -> None:
    found = server_client.margin(server, "text", [1, 7, 9], [1, 3, 9], 1)
    assert found == {"position": 1, "wanted": [7], "found": [3], "margin": 0.6, "near_tie": False}
    assert engine_http.state(server)["asked"][0]["input_ids"] == [4, 1, 1]


def test_an_answer_of_real_text_is_read(server: Server) -> None:
    row = compare_answers.generate(server, compare_answers.Prompt("s", "x", "1"), {"max_new_tokens": 4})
    assert (row["ids"], row["tokens"], row["verifies"]) == ([0, 1, 2, 3], 4, 4)


def test_every_kit_can_be_made_and_reads_the_attributes_that_are_set() -> None:
    run_server_kits.prepare()
    server = Server("a", "http://127.0.0.1:1")
    for kit in run_server_kits.KITS:
        tasks = list(run_server_kits.tasks_of(kit, server, "model", None))
        assert tasks, kit.name
        for task in tasks:
            case: Any = task.case()
            assert (case.base_url, case.model, case.target_model) == (server.url, "model", "model")
        source = inspect.getsource(run_server_kits._load(kit.module, kit.mixin))
        unread = [name for name in kit.attributes if not re.search(rf"\b(self|cls)\.{name}\b", source)]
        assert unread == [], f"{kit.name} does not read {unread}"


def test_the_kits_print_what_the_runner_looks_for() -> None:
    from sglang.test import kl_test_utils, simple_eval_common
    from sglang.test.kits import spec_server_kits

    text = "".join(map(inspect.getsource, (kl_test_utils, simple_eval_common, spec_server_kits)))
    for printed in (
        'print("Radix cache is disabled, skipping test")',
        'print(f"{avg_spec_accept_length=}")',
        'print("Bad Request Error", e)',
        'print(f"All retry attempts exhausted for request. Returning empty response.")',
    ):
        assert printed in text


def test_the_kl_kit_reads_the_prompts_that_are_written(
    server: Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.test import kl_test_utils

    monkeypatch.setattr(kl_test_utils, "CACHE_DIR", "elsewhere")
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in TURNS))
    run_server_kits.write_kl_prompts(file, "/models/made", server, tmp_path / "kl")
    assert len(kl_test_utils.get_input_ids("/models/made")) == len(TURNS) // 8
