"""A server's log -> for each engine-backed slot, whether SGLang took it, in SGLang's own words.

Reads the lines of ``lines`` and those that the target's spec writes when it is built (:func:`on_line`,
:func:`off_line`). Called by ``sgl-mega doctor --log`` on a file, and by ``watch`` on what it has collected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from pydantic import Field

from sgl_mega_plugin.contract.slot import Record
from sgl_mega_plugin.engine.log.lines import ACCEPTED, LINES, STARTED, Line, Moment, Says, lines_of, silence_of
from sgl_mega_plugin.switch import ENGINE_SLOTS

PREFIX = "sgl-mega-plugin: "
_ON = re.compile(rf"{PREFIX}slot '(\w+)' is on \((.*)\)\s*$")
_OFF = re.compile(rf"{PREFIX}slot '(\w+)' is left out: (.*?)\s*$")


def on_line(name: str, because: str) -> str:
    """What the log says of a slot that runs."""
    return f"slot {name!r} is on ({because})"


def off_line(name: str, reasons: Iterable[str]) -> str:
    """What the log says of a slot that does not run."""
    return f"slot {name!r} is left out: {'; '.join(reasons)}"


class Answer(StrEnum):
    """Whether SGLang took a switch."""

    TAKEN = "taken"
    DECLINED = "declined"
    NOT_TAKEN = "not taken"  # the server has started without the line that SGLang would have printed by then
    NOT_YET = "no line yet"  # SGLang has a line for it, and this log does not
    SILENT = "the engine does not say"
    OFF = "off"


class SlotAnswer(Record):
    """What a log tells of one engine-backed slot."""

    slot: str
    answer: Answer
    on: bool | None  # as the plugin's lines say; None where the log has none about this slot
    because: str = ""  # what turned the slot on or off
    engine: tuple[str, ...] = ()  # the engine's lines, each once
    note: str = ""


class LogReport(Record):
    """What a log tells of the engine-backed slots; of several starts in it, of the last one."""

    flag: bool  # SGLang accepted --enable-nvidia-megakernel
    plugin: bool  # the plugin's own lines are there
    starts: int
    slots: tuple[SlotAnswer, ...]

    def having(self, answer: Answer) -> tuple[SlotAnswer, ...]:
        return tuple(slot for slot in self.slots if slot.answer is answer)


class Seen(Record):
    """What one start has printed so far."""

    on: dict[str, str] = Field(default_factory=dict)  # slot -> because
    off: dict[str, str] = Field(default_factory=dict)
    started: bool = False  # every line of Moment.START has been printed that will be
    engine: tuple[tuple[Line, str], ...] = ()  # SGLang's lines with the message as printed, each message once

    def with_engine(self, line: Line, message: str) -> Seen:
        if (line, message) in self.engine:
            return self
        return self.model_copy(update={"engine": (*self.engine, (line, message))})


def read_log(lines: Iterable[str]) -> LogReport:
    """Read a whole log, one line after the other. Takes any iterable of text, such as an open file."""
    seen, starts = Seen(), 0
    for text in lines:
        if ACCEPTED in text:
            seen, starts = Seen(), starts + 1
        elif match := _ON.search(text):
            seen = seen.model_copy(update={"on": seen.on | {match[1]: match[2]}})
        elif match := _OFF.search(text):
            seen = seen.model_copy(update={"off": seen.off | {match[1]: match[2]}})
        elif STARTED.text in text:
            seen = seen.model_copy(update={"started": True})
        else:
            for line in LINES:
                if match := line.pattern.search(text):
                    seen = seen.with_engine(line, match[0])
                    break
    return LogReport(flag=starts > 0, plugin=bool(seen.on or seen.off), starts=starts, slots=answers(seen))


def answers(seen: Seen) -> tuple[SlotAnswer, ...]:
    """One answer for each of the engine's switches, in the order of the slot list."""
    return tuple(_answer(slot.name, seen) for slot in ENGINE_SLOTS)


def _answer(name: str, seen: Seen) -> SlotAnswer:
    said = [(line, message) for line, message in seen.engine if line.slot == name]
    on = True if name in seen.on else False if seen.on or seen.off else None
    because = seen.on.get(name) or seen.off.get(name, "")
    words = tuple(message for _, message in said)
    answer, note = _verdict(name, said, on=on, ours=set(seen.on), started=seen.started)
    return SlotAnswer(slot=name, answer=answer, on=on, because=because, engine=words, note=note)


def _verdict(
    name: str, said: list[tuple[Line, str]], *, on: bool | None, ours: set[str], started: bool
) -> tuple[Answer, str]:
    """An answer and a note. A line that a slot of ours prompts as well says nothing about the engine's."""
    doubtful = [line for line, _ in said if line.also_by in ours]
    own = [line for line, _ in said if line not in doubtful]
    if on is False:
        return Answer.OFF, ""
    declined = [line for line in own if line.says is Says.DECLINED]
    if declined:
        return Answer.DECLINED, declined[-1].means
    if own:
        return Answer.TAKEN, own[0].means
    if doubtful:
        return Answer.SILENT, f"the plugin's slot {doubtful[0].also_by!r} makes SGLang print this line too"
    silence = silence_of(name)
    if silence is not None:
        return Answer.SILENT, f"SGLang prints nothing about it; it acts {silence.acts}"
    moments = dict.fromkeys(line.moment for line in lines_of(name))
    if started and set(moments) == {Moment.START}:
        return Answer.NOT_TAKEN, "the server has started without SGLang's line about it, and without a reason"
    return Answer.NOT_YET, f"SGLang prints a line {' or '.join(moments)}, if it takes it"
