"""The tools that compare answers of running servers: what they send, what they count, and what they call a failure."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from math import comb
from pathlib import Path
from typing import Any

import compare_answers
import prompt_files
import pytest
import server_client
import soak_servers
from fake_server import FakeServer, letters, serving
from server_client import Server, ServerError, chance_of_more, first_difference

from sgl_mega_plugin.embedded import tokenizer

TURNS = [f"question {number}" for number in range(40)]


def _changed(text: str) -> list[int]:
    """Another token in the middle of a third of the answers."""
    ids = letters(text)
    return ids if sum(map(ord, text)) % 3 else [*ids[:5], ids[5] + 1, *ids[6:]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [turn], "answer": "7"}) + "\n" for turn in TURNS))
    return file


@pytest.fixture
def servers() -> Iterator[dict[str, FakeServer]]:
    made = {"base": FakeServer(), "base2": FakeServer(), "plugin": FakeServer()}
    with ExitStack() as stack:
        yield {name: stack.enter_context(serving(fake)) for name, fake in made.items()}


def test_a_server_is_a_name_a_url_and_a_log() -> None:
    assert Server.parse("a=http://h:1/,/tmp/l") == Server("a", "http://h:1", "/tmp/l")
    for wrong in ("http://h:1", "a=http://h", "a=", ""):
        with pytest.raises(ValueError, match=r"is not NAME=http://HOST:PORT"):
            Server.parse(wrong)


@pytest.mark.parametrize("tool", [soak_servers, compare_answers], ids=lambda tool: tool.__name__)
@pytest.mark.parametrize(
    ("server", "file", "message"),
    [
        ("base=nourl", "there", r"'base=nourl' is not NAME=http://HOST:PORT"),
        ("base=http://h:1", "nothere", r"is no file: JSON lines of prompts are wanted"),
    ],
)
def test_a_wrong_argument_is_named(
    tool: Any, server: str, file: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").write_text("")
    name = "set=" if tool is compare_answers else ""
    with pytest.raises(SystemExit) as ended:
        tool.main(["--server", server, "--prompts", f"{name}{tmp_path / file}", "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_the_chat_format_is_the_demo_tokenizers() -> None:
    assert server_client.SYSTEM == tokenizer.SYSTEM
    assert server_client.chat("x").startswith(f"<|im_start|>system\n{tokenizer.SYSTEM}<|im_end|>\n<|im_start|>user\nx")


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [1], 0)],
    ids=["empty", "equal", "other id", "shorter", "longer", "nothing"],
)
def test_answers_part_at_their_first_other_id(one: list[int], other: list[int], at: int | None) -> None:
    assert first_difference(one, other) == at


def test_the_chance_of_more_mismatches_is_that_of_drawing_them() -> None:
    assert chance_of_more(0, 10, 0, 10) == 1.0
    assert chance_of_more(5, 10, 0, 10) == comb(10, 5) / comb(20, 5)
    assert chance_of_more(3, 500, 3, 500) > 0.5
    assert chance_of_more(40, 1000, 10, 1000) < soak_servers.SIGNIFICANT


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("Traceback (most recent call last):", True),
        ("[2026-01-01 ERROR] Scheduler hit an exception", True),
        ("ValueError: pool memory leak detected! total=5", True),
        ("[2026-01-01 10:00:00] [http_server] Error: The input is longer than the model's context length", True),
        ("[2026-01-01 10:00:00] Received sigquit from a child process. It usually means the child failed.", True),
        ("[2026-01-01 10:00:00] Health check failed. Server couldn't get a response from detokenizer", True),
        (
            "[2026-01-01 10:00:00] [http_server] Error: Request is disconnected from the client side (type 3). "
            "Abort request obj.rid='soak-0001-000001'",
            False,
        ),
        ("[2026-01-01 TP0] Decode batch, #running-req: 1, #full token: 5", False),
        ('INFO: 127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK', False),
    ],
)
def test_lines_of_a_log_that_tell_of_an_error(tmp_path: Path, line: str, counts: bool) -> None:
    log = tmp_path / "log"
    log.write_text(f"Traceback before the soak\nERROR before\n{line}\n")
    start = len("Traceback before the soak\nERROR before\n")
    assert server_client.log_errors(str(log), start) == ([line] if counts else [])
    assert server_client.log_size(str(log)) == start + len(line) + 1
    assert (server_client.log_errors(""), server_client.log_size("")) == ([], 0)


def test_a_plan_is_the_same_for_every_server_and_mixes_what_it_says() -> None:
    plan = [soak_servers.ask(1, user, index, TURNS) for user in range(4) for index in range(200)]
    assert plan == [soak_servers.ask(1, user, index, TURNS) for user in range(4) for index in range(200)]
    assert plan[0] != soak_servers.ask(2, 0, 0, TURNS)
    assert {one.sampling["temperature"] for one in plan} == {0.0, 0.7, 1.0}
    assert {one.abort for one in plan} == {"", "disconnect", "request"}
    assert {one.streams for one in plan} == {True, False}
    assert {one.kind for one in plan} == {"plain", *soak_servers.UNUSUAL}
    assert {one.user for one in plan if one.kind != "plain"} == {0}
    shared = [one for one in plan if one.text.startswith(TURNS[0] + "\n\n" + TURNS[1])]
    assert len(shared) > 20
    assert len({one.text for one in shared}) > 10


def test_no_prompt_of_long_turns_outgrows_a_context() -> None:
    long = [f"{number} " + "word " * 500 for number in range(40)]
    lengths = [len(soak_servers.ask(1, 1, index, long).text) for index in range(300)]
    assert 12_000 < max(lengths) < 15_000


def _soak(servers: dict[str, FakeServer], prompts: Path, out: Path) -> tuple[int, dict[str, Any]]:
    arguments = [f"--server={name}={fake.url}" for name, fake in servers.items()]
    arguments += ["--prompts", str(prompts), "--minutes", "0.05", "--rounds", "2", "--users", "4", "--out", str(out)]
    code = soak_servers.main(arguments)
    return code, json.loads((out / "soak.json").read_text())


def test_equal_servers_pass_a_soak_and_aborts_are_not_compared(
    servers: dict[str, FakeServer], prompts: Path, tmp_path: Path
) -> None:
    code, found = _soak(servers, prompts, tmp_path / "out")
    assert (code, [arm["fails"] for arm in found["arms"].values()]) == (0, [[], [], []])
    plugin = found["arms"]["plugin"]
    assert plugin["compared"] > 5
    assert plugin["mismatches"] == []
    assert 0 < plugin["compared_tokens"] < plugin["tokens"]
    assert plugin["outcomes"].get("error", 0) == 0
    assert plugin["outcomes"]["aborted"] > 0
    assert [rest["flushed"] for rest in plugin["rests"]] == [0, 0]
    assert "| fails | no | no | no |" in (tmp_path / "out" / "soak.md").read_text()


def test_a_soak_scores_each_greedy_answer_that_differs(
    servers: dict[str, FakeServer], prompts: Path, tmp_path: Path
) -> None:
    servers["plugin"].answer = _changed
    _, found = _soak(servers, prompts, tmp_path / "out")
    plugin = found["arms"]["plugin"]
    assert plugin["mismatches"], "a third of the answers differ"
    assert {row["position"] for row in plugin["mismatches"]} == {5}
    scored = [row for row in plugin["mismatches"] if "margin" in row]
    assert {(row["margin"], row["near_tie"]) for row in scored} == {(0.25, True)}
    assert found["arms"]["base2"]["mismatches"] == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rests": [{"ok": False, "used": 3}]}, "1 of 1 rests with KV slots held"),
        ({"log_errors": ["Traceback"]}, "1 error lines"),
        ({"outcomes": {"error": 2}}, "2 requests failed"),
        ({"mismatches": [{"near_tie": True}] * 50}, "50 of 1000 answers differ, 2 of the noise's"),
        ({"mismatches": [{"near_tie": False}] * 2}, "2 differences are no near tie"),
        ({"compared": 0, "mismatches": []}, "no answer to compare"),
        ({"rests": []}, "0 of 0 rests"),
        ({"mismatches": [{"unscored": "OSError: gone"}]}, "1 differences could not be scored: OSError: gone"),
        ({}, None),
    ],
)
def test_why_an_arm_fails(change: dict[str, Any], why: str | None) -> None:
    good = {"rests": [{"ok": True}], "log_errors": [], "outcomes": {}, "compared": 1000}
    good["mismatches"] = [{"near_tie": True}] * 3
    noise = good | {"mismatches": [{"near_tie": True}] * 2}
    found = soak_servers.verdict(good | change, noise)
    assert found == [] if why is None else any(why in one for one in found), found


def test_an_idle_server_that_holds_slots_is_not_at_rest() -> None:
    with serving(FakeServer(held_slots=3)) as fake:
        found = server_client.settle(Server("a", fake.url), 0.1)
    assert (found["ok"], found["used"]) == (False, 3)


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        (FakeServer(), {"ok": True, "pool": 100, "used": 0, "flushed": 0}),
        (FakeServer(ranks=2), {"ok": True, "pool": 200, "used": 0, "flushed": 0}),
        (FakeServer(ranks=0), {"ok": False, "flushed": None}),
        (FakeServer(publishes=False), {"ok": False, "flushed": None, "why": "the load is not published any more"}),
    ],
    ids=["one rank", "two ranks", "no rank", "old report"],
)
def test_a_server_is_at_rest_by_what_it_publishes_after_the_flush(fake: FakeServer, expected: dict[str, Any]) -> None:
    with serving(fake):
        found = server_client.settle(Server("a", fake.url), 0.1)
    assert found | expected == found
    assert [row["path"] for row in fake.seen] == ["/flush_cache?timeout=30"]


def test_no_request_id_begins_with_anothers() -> None:
    ids = {
        soak_servers.request_id("t", soak_servers.Ask(user, index, "", {}))
        for user in (0, 1, 11, 111)
        for index in (0, 1, 10, 11, 100, 123456)
    }
    assert len(ids) == 24
    assert [(one, other) for one in ids for other in ids if one != other and one.startswith(other)] == []


def _ask(**changes: Any) -> soak_servers.Ask:
    return soak_servers.Ask(0, 0, "x", {"max_new_tokens": 400, "temperature": 0.0}, **changes)


@pytest.mark.parametrize(
    ("fake", "one", "outcome", "why"),
    [
        ({}, _ask(abort="request", abort_after=0.05), "aborted", "'type': 'abort'"),
        ({}, _ask(abort="request", abort_after=0.05, streams=True), "aborted", "'type': 'abort'"),
        ({"fails_aborts": True}, _ask(abort="request", abort_after=0.05), "error", "status 500"),
        ({"gives_up": True}, _ask(), "error", "out of memory"),
        ({"gives_up": True}, _ask(abort="request", abort_after=30.0), "error", "out of memory"),
        ({"in_pieces": True}, _ask(streams=True), "error", "the last event has 2 of 400 ids"),
        ({"answer": lambda text: list(range(401))}, _ask(streams=True), "completed", ""),
    ],
    ids=["aborts", "aborts a stream", "abort refused", "given up", "given up before the abort", "pieces", "whole"],
)
def test_what_becomes_of_a_request(fake: dict[str, Any], one: soak_servers.Ask, outcome: str, why: str) -> None:
    with serving(FakeServer(**{"step_s": 0.002, "answer": lambda text: list(range(400))} | fake)) as server:
        row = soak_servers.send(Server("a", server.url), one, "t")
    assert (row["outcome"], why in row.get("error", "")) == (outcome, True), row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server=a=http://h:1", "--server=b=http://h:2"], "--noise base2 is none of b"),
        (["--server=base2=http://h:1", "--server=b=http://h:2"], "--noise base2 is none of b"),
        (["--server=a=http://h:1", "--server=a=http://h:2"], "two servers are called a"),
        (["--server=a=http://h:1,/no/such/log"], "no such log: /no/such/log"),
    ],
    ids=["no noise", "reference as noise", "one name", "no log"],
)
def test_a_soak_that_could_not_judge_does_not_start(
    arguments: list[str], message: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        soak_servers.main([*arguments, "--prompts", str(prompts), "--out", str(tmp_path / "out")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_soak_without_prompts_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(SystemExit):
        soak_servers.main(["--server=a=http://h:1", "--prompts", str(tmp_path / "empty"), "--out", str(tmp_path)])
    assert "the files of prompts are empty" in capsys.readouterr().err


def test_a_prompt_keeps_its_line_separators(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"turns": ["one\u2028two\x85three"]}, {"turns": ["four"]}]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    assert prompt_files.read_prompts(file) == rows


def test_a_client_that_leaves_a_stream_closes_the_connection() -> None:
    with serving(FakeServer(step_s=0.02, answer=lambda text: list(range(400)))) as fake:
        one = soak_servers.Ask(0, 0, "x", {"max_new_tokens": 400, "temperature": 0.0}, streams=True, abort="disconnect")
        assert soak_servers.send(Server("a", fake.url), one, "t")["outcome"] == "aborted"
        until = time.monotonic() + 5
        while not fake.gone and time.monotonic() < until:
            time.sleep(0.02)
        assert fake.gone == 1


def test_a_request_that_a_server_refuses_is_an_error_with_its_text() -> None:
    with serving(FakeServer(fails=True)) as fake:
        row = soak_servers.send(Server("a", fake.url), soak_servers.ask(1, 1, 0, TURNS), "t")
        with pytest.raises(ServerError, match="status 500"):
            server_client.call(Server("a", fake.url), "/generate", {"text": "x", "sampling_params": {}})
    assert row["outcome"] == "error"
    assert "status 500" in row["error"]


@pytest.mark.parametrize(
    ("text", "number"),
    [("so \\boxed{1,200} of 7", "1200"), ("it is 18.", "18"), ("\\boxed{$5.00}", "5"), ("none", None), ("-3", "-3")],
)
def test_the_number_of_an_answer(text: str, number: str | None) -> None:
    assert compare_answers.last_number(text) == number


def test_answers_are_compared_with_the_first_servers(
    servers: dict[str, FakeServer], prompts: Path, tmp_path: Path
) -> None:
    servers["plugin"].answer = _changed
    out = tmp_path / "out"
    arguments = [f"--server={name}={servers[name].url}" for name in ("base", "plugin")]
    arguments += ["--prompts", f"made={prompts}", "--again", "base", "--count", "30", "--out", str(out)]
    assert compare_answers.main(arguments) == 0
    arms = json.loads((out / "answers.json").read_text())["arms"]
    assert list(arms) == ["base", "plugin", "base again"]
    apart = arms["plugin"]["differences"]
    assert {(row["position"], row["margin"], row["near_tie"]) for row in apart} == {(5, 0.25, True)}
    assert [row["prompt"] for row in apart] == [
        index for index, turn in enumerate(TURNS[:30]) if sum(map(ord, server_client.chat(turn))) % 3 == 0
    ]
    assert arms["base again"]["standard_errors_from_reference"]["sampled made"]["tokens"] == 0.0
    assert arms["base"]["sampled made"]["boxed"] == [1.0, 0.0]
    before = (out / "answers.md").read_text()
    assert compare_answers.main([*arguments, "--report-only"]) == 0
    assert (out / "answers.md").read_text() == before


def test_a_server_that_breaks_off_is_reported_and_its_answers_are_kept(
    servers: dict[str, FakeServer], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers["plugin"].fails = True
    arguments = [f"--server={name}={servers[name].url}" for name in ("base", "plugin")]
    out = tmp_path / "out"
    assert compare_answers.main([*arguments, "--prompts", f"made={prompts}", "--count", "3", "--out", str(out)]) == 1
    assert "server 'plugin': ServerError" in capsys.readouterr().err
    assert json.loads((out / "answers.json").read_text())["arms"]["base"]["greedy"]["answers"] == 3


def test_an_answer_that_a_server_gave_up_is_no_answer(
    servers: dict[str, FakeServer], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers["plugin"].gives_up = True
    out = tmp_path / "out"
    out.mkdir()
    (out / "plugin.sampled.jsonl").write_text("of an earlier run\n")
    arguments = [f"--server={name}={servers[name].url}" for name in ("base", "plugin")]
    assert compare_answers.main([*arguments, "--prompts", f"made={prompts}", "--count", "3", "--out", str(out)]) == 1
    assert "out of memory" in capsys.readouterr().err
    arms = json.loads((out / "answers.json").read_text())["arms"]
    assert arms["plugin"]["greedy"]["answers"] == 0
    assert "sampled made" not in arms["plugin"]


def test_a_difference_that_the_reference_cannot_score_is_reported_as_that(
    servers: dict[str, FakeServer], prompts: Path, tmp_path: Path
) -> None:
    servers["plugin"].answer = _changed
    out = tmp_path / "out"
    arguments = [f"--server={name}={servers[name].url}" for name in ("base", "plugin")]
    arguments += ["--prompts", f"made={prompts}", "--count", "6", "--greedy-only", "--out", str(out)]
    assert compare_answers.main(arguments) == 0
    before = json.loads((out / "answers.json").read_text())["arms"]["plugin"]["differences"]
    servers["base"].fails = True
    assert compare_answers.main([*arguments, "--report-only"]) == 0
    apart = json.loads((out / "answers.json").read_text())["arms"]["plugin"]["differences"]
    assert [row["prompt"] for row in apart] == [row["prompt"] for row in before] != []
    assert all("status 500" in row["unscored"] and "near_tie" not in row for row in apart)
    assert f"| plugin | 6 | {len(apart)} | 0 | {len(apart)} |" in (out / "answers.md").read_text()


def test_sampling_a_server_again_that_is_none_is_refused(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--server=base=http://h:1", "--again", "bas", "--prompts", f"made={prompts}", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        compare_answers.main(arguments)
    assert "--again names no server: bas; there are base" in capsys.readouterr().err
