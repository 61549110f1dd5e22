"""``sgl-mega doctor --log FILE``: whether a server's SGLang took what was switched on, as its log says."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import typer
from rich.markup import escape

from sgl_mega_plugin.cli.output import FAILED, WrongUseError, print_json, stdout
from sgl_mega_plugin.engine.log.read import Answer, LogReport, SlotAnswer, read_log

#: In this order the groups are shown.
_STYLES = {
    Answer.DECLINED: "red",
    Answer.TAKEN: "green",
    Answer.NOT_TAKEN: "yellow",
    Answer.NOT_YET: "yellow",
    Answer.SILENT: "yellow",
    Answer.OFF: "dim",
}


def report_log(path: Path, *, as_json: bool) -> None:
    """Print what a log says. Exit code 1 where SGLang declined a slot, or where the log says nothing at all."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            report = read_log(lines)
    except OSError as error:
        raise WrongUseError(f"--log {str(path)!r} cannot be read: {error.strerror}; name a server's log file") from None
    problems = _problems(path, report)
    if as_json:
        print_json({"log": str(path), "problems": problems, **report.model_dump(mode="json")})
    else:
        _print(path, report, problems)
    if problems:
        raise typer.Exit(FAILED)


def _problems(path: Path, report: LogReport) -> list[str]:
    if not (report.flag or report.plugin or any(slot.engine for slot in report.slots)):
        return [f"{path} has no line about the flag, a slot or a switch: give the log of a server, of level info"]
    return [f"slot {slot.slot!r}: {slot.engine[-1]}" for slot in report.having(Answer.DECLINED)]


def _print(path: Path, report: LogReport, problems: list[str]) -> None:
    """The answers, those in the same words together."""
    console = stdout()
    console.print(f"[bold cyan]{escape(str(path))}[/bold cyan], {_header(report)}", soft_wrap=True)
    for answer, style in _STYLES.items():
        groups: dict[str, list[str]] = {}
        for slot in report.having(answer):
            groups.setdefault(_words(slot), []).append(slot.slot)
        for words, names in groups.items():
            console.print(f"[{style}]{answer.value}[/{style}]  {', '.join(names)}", soft_wrap=True)
            console.print(indent(words, "    "), markup=False, soft_wrap=True)
    if problems and not report.having(Answer.DECLINED):
        console.print(problems[0], style="red", markup=False, soft_wrap=True)


def _header(report: LogReport) -> str:
    flag = "flag accepted" if report.flag else "no line that SGLang accepted the flag"
    more = f", the last of {report.starts} starts" if report.starts > 1 else ""
    return flag + ("" if report.plugin else ", no line of the plugin about its slots") + more


def _words(slot: SlotAnswer) -> str:
    """The engine's own lines, then what they mean, then what turned the slot on or off."""
    parts = [*(f'"{line}"' for line in slot.engine), slot.note]
    if slot.on is not None:
        because = slot.because or "not among the slots that the log has on"
        parts.append(f"{'on' if slot.on else 'off'}: {because}")
    return "\n".join(part for part in parts if part)
