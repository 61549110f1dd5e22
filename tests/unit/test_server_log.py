"""What is read from a server's log: made-up logs with SGLang's lines in them, a real one, and a worker's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_tools import answer, invoke, program, use_clean_environment
from made_slots import registry_of

from sgl_mega_plugin.contract import Backend, Host, Plan
from sgl_mega_plugin.engine.log import watch
from sgl_mega_plugin.engine.log.lines import ACCEPTED, LINES, SILENT, STARTED, Line, Moment, Says
from sgl_mega_plugin.engine.log.read import PREFIX, Answer, LogReport, SlotAnswer, off_line, on_line, read_log
from sgl_mega_plugin.engine.log.watch import Watch
from sgl_mega_plugin.plan import make_plan
from sgl_mega_plugin.switch import ENGINE_SLOTS, MASTER_SWITCH, MASTER_VARIABLES, SLOTS_VARIABLE
from sgl_mega_slots import SLOTS

ROOT = Path(__file__).parents[2]
STAMP = "[2026-11-30 17:41:16 TP0] "
FLAG = f"{ACCEPTED}sm_90"
READY = f"{STARTED.text}1234, chunked_prefill_size=8192"
MASTERED = [slot.name for slot in ENGINE_SLOTS if slot.engine_switch in MASTER_VARIABLES]
NUMBERS, WORDS = "%d", "%s"


def filled(line: Line, words: str = "a reason: (bs=1, x)") -> str:
    """The message with its fields filled in, as logging does it."""
    return line.text.replace(NUMBERS, "16").replace(WORDS, words)


def log_of(*messages: str, on: tuple[str, ...] = (), start: bool = False) -> list[str]:
    told = [PREFIX + on_line(name, "turned on") for name in on]
    return [STAMP + text + "\n" for text in (FLAG, *told, *messages, *([READY] if start else []))]


def slot_of(report: LogReport, name: str) -> SlotAnswer:
    return next(slot for slot in report.slots if slot.slot == name)


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.slot}-{line.says}")
@pytest.mark.parametrize("stamp", [STAMP, "", "INFO:sglang.srt.x:"], ids=["stamp", "bare", "other-format"])
def test_each_line_is_recognized_as_its_slots_and_no_others(line: Line, stamp: str) -> None:
    report = read_log([f"{stamp}{filled(line)}\n"])
    told = [slot.slot for slot in report.slots if slot.engine]
    assert told == [line.slot]
    found = slot_of(report, line.slot)
    assert found.engine == (filled(line),)
    assert found.answer is (Answer.TAKEN if line.says is Says.TAKEN else Answer.DECLINED)
    assert found.note == line.means


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.slot}-{line.says}")
def test_a_line_cut_short_is_not_recognized(line: Line) -> None:
    cut = line.text.partition("%")[0].rstrip()[:-3]
    assert [slot.slot for slot in read_log([STAMP + cut]).slots if slot.engine] == []


@pytest.mark.parametrize("silence", SILENT, ids=lambda silence: silence.slot)
@pytest.mark.parametrize("start", [False, True])
def test_what_sglang_does_not_print_is_not_made_up(silence: object, start: bool) -> None:
    name = silence.slot  # type: ignore[attr-defined]
    found = slot_of(read_log(log_of(on=(name,), start=start)), name)
    assert (found.answer, found.engine) == (Answer.SILENT, ())
    assert "prints nothing" in found.note


def test_a_line_that_belongs_to_the_start_is_missed_once_the_server_has_started() -> None:
    at_start = {line.slot for line in LINES if line.moment is Moment.START}
    at_a_step = {line.slot for line in LINES} - at_start
    names = tuple(sorted(at_start | at_a_step))
    starting, started = read_log(log_of(on=names)), read_log(log_of(on=names, start=True))
    assert {slot_of(starting, name).answer for name in names} == {Answer.NOT_YET}
    assert {slot_of(started, name).answer for name in at_start} == {Answer.NOT_TAKEN}
    assert {slot_of(started, name).answer for name in at_a_step} == {Answer.NOT_YET}
    assert at_a_step
    assert "no reason" not in slot_of(started, "mid_fold").note
    assert "at the first step" in slot_of(started, "mid_fold").note


def test_a_later_refusal_wins_over_an_earlier_line() -> None:
    taken, declined = (line for line in LINES if line.slot == "sampling_accept_graph")
    found = slot_of(read_log(log_of(filled(taken), filled(declined), on=("sampling_accept_graph",))), taken.slot)
    assert found.answer is Answer.DECLINED
    assert found.engine == (filled(taken), filled(declined))


def test_a_line_of_every_rank_counts_once() -> None:
    line = next(line for line in LINES if line.slot == "mid_fold")
    lines = [f"[2026-11-30 17:41:16 TP{rank}] {filled(line)}\n" for rank in range(4)]
    assert slot_of(read_log(lines), "mid_fold").engine == (filled(line),)


def test_a_line_that_our_relay_prompts_too_says_nothing_about_the_switch() -> None:
    line = next(line for line in LINES if line.slot == "post_fold")
    assert line.also_by == "relay"
    alone = read_log(log_of(filled(line), on=("post_fold",)))
    beside = read_log(log_of(filled(line), on=("post_fold", "relay")))
    off = read_log(log_of(filled(line), on=("relay",)))
    assert [slot_of(report, "post_fold").answer for report in (alone, beside, off)] == [
        Answer.TAKEN, Answer.SILENT, Answer.OFF,
    ]  # fmt: skip
    assert "slot 'relay'" in slot_of(beside, "post_fold").note


def test_slots_that_print_the_same_line_exist() -> None:
    assert {line.also_by for line in LINES} - {None} <= {slot.name for slot in SLOTS}


def test_the_last_of_several_starts_counts() -> None:
    line = next(line for line in LINES if line.slot == "mid_fold")
    report = read_log([*log_of(filled(line), on=("mid_fold", "post_fold"), start=True), *log_of(on=("post_fold",))])
    assert report.starts == 2
    assert slot_of(report, "mid_fold").answer is Answer.OFF
    assert slot_of(report, "post_fold").answer is Answer.NOT_YET


def test_a_log_without_the_plugins_lines_still_has_sglangs() -> None:
    """The master switch acts without the flag: then nothing says what is on."""
    line = next(line for line in LINES if line.slot == "mid_fold")
    report = read_log([STAMP + filled(line), STAMP + READY])
    assert (report.flag, report.plugin) == (False, False)
    assert {slot.on for slot in report.slots} == {None}
    assert slot_of(report, "mid_fold").answer is Answer.TAKEN


def test_a_real_log_of_a_dense_target_with_all_switches_on() -> None:
    path = ROOT / "docs/benchmarks/h200-first-run/server_log_smollm2.txt"
    report = read_log(path.read_text().splitlines())
    assert (report.flag, report.plugin, report.starts) == (True, True, 1)
    assert [slot.slot for slot in report.slots if slot.on] == MASTERED
    assert {slot.because for slot in report.slots if slot.on} == {f"turned on by {MASTER_SWITCH}"}
    # The file keeps the plugin's lines alone, so that none of SGLang's is in it.
    assert {slot.answer for slot in report.slots if slot.on} == {Answer.NOT_YET, Answer.SILENT}


def plan_of(environ: dict[str, str]) -> Plan:
    host = Host(runtime="sglang", isa="sm_90", backend=Backend.KERNEL, engine_version="0.5.23")
    return make_plan(registry=registry_of(), environ=environ, host=host)


def test_what_the_spec_writes_is_what_is_read() -> None:
    plan = plan_of({MASTER_SWITCH: "1", SLOTS_VARIABLE: "-post_fold", "SGLANG_OPT_DSV41_DSPARK_MID_FOLD": "0"})
    lines = [PREFIX + on_line(entry.name, entry.because) for entry in plan.active]
    lines += [PREFIX + off_line(entry.name, entry.reasons) for entry in plan.inactive]
    report = read_log(lines)
    assert {slot.slot for slot in report.slots if slot.on} == set(MASTERED) - {"post_fold", "mid_fold"}
    assert slot_of(report, "post_fold").because == f"switched off by {SLOTS_VARIABLE}='-post_fold'"
    assert "SGLANG_OPT_DSV41_DSPARK_MID_FOLD='0'" in slot_of(report, "mid_fold").because


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture) -> Iterator[logging.Logger]:
    """SGLang's logger with a watch for all sixteen switches on it."""
    caplog.set_level(logging.INFO)
    engine = logging.getLogger(watch.ENGINE_LOGGER)
    before = list(engine.handlers)
    assert watch.install(plan_of({MASTER_SWITCH: "1"})) is not None
    yield logging.getLogger("sglang.srt.somewhere")
    watch.remove()
    assert engine.handlers == before


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage().removeprefix(PREFIX) for r in caplog.records if r.name == watch.__name__]


def say(logger: logging.Logger, slot: str, says: Says = Says.TAKEN) -> str:
    """Log a line of SGLang's as SGLang does, and return the message."""
    line = next(line for line in LINES if line.slot == slot and line.says is says)
    values = tuple(16 if field[0] == "d" else "why" for field in line.text.split("%")[1:])
    logger.info(line.text, *values)
    return line.text % values


def test_a_worker_sums_up_when_its_scheduler_has_started(
    watched: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    say(watched, "draft_prep_fork")
    say(watched, "fused_accept_tail")
    refused = say(watched, "defer_context_kv", Says.DECLINED)
    watched.info("a line of SGLang about something else: %s", "x")
    logging.getLogger(STARTED.logger + ".elsewhere").info(READY)
    assert ours(caplog) == []
    logging.getLogger(STARTED.logger).info(READY)
    silent = ", ".join(name for name in MASTERED if name in {silence.slot for silence in SILENT})
    assert ours(caplog) == [
        "engine switches taken: draft_prep_fork, fused_accept_tail",
        f"engine switches declined: defer_context_kv: {refused}",
        "engine switches not taken, SGLang gives no reason: target_verify_metadata_glue, target_metadata_early",
        "engine switches that SGLang decides at a step: engine_blockwise_rejection, sampling_accept_graph, mid_fold, "
        "post_fold, skip_prefilled_inputs",
        f"engine switches of which SGLang does not say whether it took them: {silent}",
    ]
    logging.getLogger(STARTED.logger).info(READY)
    assert len(ours(caplog)) == 5, "the summary comes once"


def test_a_switch_that_is_taken_at_a_step_is_told_then_and_once(
    watched: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger(STARTED.logger).info(READY)
    before = len(ours(caplog))
    for _ in range(3):
        say(watched, "mid_fold")
    refused = say(watched, "sampling_accept_graph", Says.DECLINED)
    assert ours(caplog)[before:] == [
        "engine switches taken: mid_fold",
        f"engine switches declined: sampling_accept_graph: {refused}",
    ]


def test_a_second_watch_takes_the_place_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    engine = logging.getLogger(watch.ENGINE_LOGGER)
    for _ in range(2):
        watch.install(plan_of({MASTER_SWITCH: "1"}))
    assert [type(handler) for handler in engine.handlers].count(Watch) == 1
    assert watch.install(plan_of({})) is None
    assert [type(handler) for handler in engine.handlers].count(Watch) == 0


def test_a_message_that_cannot_be_made_stops_nobody(
    watched: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    line = next(line for line in LINES if line.text.count("%") == 1)
    logging.getLogger(watch.ENGINE_LOGGER).handlers[-1].handle(
        logging.LogRecord("sglang", logging.INFO, "", 0, line.text, ("too", "many"), None)
    )
    assert "not all arguments converted" in capsys.readouterr().err


@pytest.fixture
def log_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_clean_environment(monkeypatch)
    return tmp_path / "server.log"


def test_doctor_reads_a_log(log_file: Path) -> None:
    taken = next(line for line in LINES if line.slot == "mid_fold")
    log_file.write_text("".join(log_of(filled(taken), on=("mid_fold", "prepare_inputs_once"), start=True)))
    found = answer("doctor", "--log", str(log_file), "--json")
    assert (found["flag"], found["problems"]) == (True, [])
    states = {slot["slot"]: slot["answer"] for slot in found["slots"]}
    assert (states["mid_fold"], states["prepare_inputs_once"]) == ("taken", "the engine does not say")
    assert states["post_fold"] == "off"
    text = invoke("doctor", "--log", str(log_file)).stdout
    assert f'"{filled(taken)}"' in text
    assert not [name for name in states if name not in text]
    assert "Slots of an SGLang server" not in text, "the machine's own report came along"


def test_doctor_fails_where_sglang_declined(log_file: Path) -> None:
    declined = next(line for line in LINES if line.slot == "defer_context_kv" and line.says is Says.DECLINED)
    log_file.write_text("".join(log_of(filled(declined, "hicache"), on=("defer_context_kv",))))
    found = answer("doctor", "--log", str(log_file), "--json", code=1)
    assert found["problems"] == [f"slot 'defer_context_kv': {filled(declined, 'hicache')}"]
    assert invoke("doctor", "--log", str(log_file)).exit_code == 1


@pytest.mark.parametrize("text", ["", "GET /health 200\n", "\x00\xff\n"], ids=["empty", "another", "binary"])
def test_doctor_fails_where_a_log_says_nothing(log_file: Path, text: str) -> None:
    log_file.write_bytes(text.encode("latin-1"))
    (problem,) = answer("doctor", "--log", str(log_file), "--json", code=1)["problems"]
    assert "of level info" in problem
    assert problem in invoke("doctor", "--log", str(log_file)).stdout


def test_doctor_needs_a_file_that_is_there(log_file: Path) -> None:
    result = invoke("doctor", "--log", str(log_file))
    assert result.exit_code == 2
    assert "No such file" in result.stderr
    assert "Traceback" not in result.output


def row(name: str) -> str:
    """A switch's row of the table in docs/serving-deepseek-v4.1.md; a failure prints it, to be pasted there."""
    silence = next((silence for silence in SILENT if silence.slot == name), None)
    if silence is not None:
        return f"| `{name}` | never: acts {silence.acts} |  |"
    moments = {says: {line.moment.value for line in LINES if (line.slot, line.says) == (name, says)} for says in Says}
    return f"| `{name}` | {' or '.join(moments[Says.TAKEN])} | {' or '.join(moments[Says.DECLINED])} |"


def test_the_page_says_of_every_switch_when_sglang_tells() -> None:
    page = (ROOT / "docs" / "serving-deepseek-v4.1.md").read_text()
    section = page[page.index("## Did the engine take it?") : page.index("## A reduced model")]
    found = {line for line in section.splitlines() if line.startswith("| `")}
    assert found == {row(slot.name) for slot in ENGINE_SLOTS}


def test_doctor_reads_a_log_where_neither_torch_nor_sglang_is(log_file: Path) -> None:
    log_file.write_text("".join(log_of(on=("mid_fold",))))
    done = program("doctor", "--log", str(log_file), without=("torch", "sglang"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "mid_fold" in done.stdout
