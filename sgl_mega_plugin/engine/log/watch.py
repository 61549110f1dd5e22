"""What SGLang says of its switches, collected in the process that says it, and put together once it has started.

A log handler on SGLang's loggers in the first rank's worker. It recognizes messages by their format, so that it reads
nothing else. When the scheduler reports itself ready, the log gets a summary; a switch that SGLang takes up
only at a step gets a line of its own then. Installed by the target's build, while engine-backed slots are on.
"""

from __future__ import annotations

import logging

from sgl_mega_plugin.contract import Plan
from sgl_mega_plugin.engine.log.lines import LINES, STARTED
from sgl_mega_plugin.engine.log.read import PREFIX, Answer, Seen, SlotAnswer, answers

logger = logging.getLogger(__name__)

ENGINE_LOGGER = "sglang"
_BY_TEXT = {line.text: line for line in LINES}


class Watch(logging.Handler):
    """Collects SGLang's lines about the switches that a plan has on."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(logging.INFO)
        self.seen = Seen(on={entry.name: entry.because for entry in plan.active})
        self._told: set[tuple[str, Answer]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Look at a record. What goes wrong here is reported as any handler's faults are, and never reaches SGLang."""
        try:
            self._look(record)
        except Exception:
            self.handleError(record)

    def _look(self, record: logging.LogRecord) -> None:
        line = _BY_TEXT.get(record.msg) if isinstance(record.msg, str) else None
        if line is not None:
            self.seen = self.seen.with_engine(line, record.getMessage())
            if self.seen.started:
                self._tell_changes()
        elif record.name == STARTED.logger and not self.seen.started and str(record.msg).startswith(STARTED.text):
            self.seen = self.seen.model_copy(update={"started": True})
            self._tell_all()

    def _mine(self) -> list[SlotAnswer]:
        return [slot for slot in answers(self.seen) if slot.on]

    def _tell_all(self) -> None:
        for answer in (Answer.TAKEN, Answer.DECLINED, Answer.NOT_TAKEN, Answer.NOT_YET, Answer.SILENT):
            found = [slot for slot in self._mine() if slot.answer is answer]
            self._told |= {(slot.slot, answer) for slot in found}
            for text in summary(answer, found):
                logger.info("%s%s", PREFIX, text)

    def _tell_changes(self) -> None:
        for slot in self._mine():
            if slot.answer in (Answer.TAKEN, Answer.DECLINED) and (slot.slot, slot.answer) not in self._told:
                self._told.add((slot.slot, slot.answer))
                for text in summary(slot.answer, [slot]):
                    logger.info("%s%s", PREFIX, text)


def summary(answer: Answer, slots: list[SlotAnswer]) -> list[str]:
    """The lines about slots with the same answer; none for none."""
    if not slots:
        return []
    if answer is Answer.DECLINED:
        return [f"engine switches declined: {slot.slot}: {slot.engine[-1]}" for slot in slots]
    words = {
        Answer.TAKEN: "engine switches taken",
        Answer.NOT_TAKEN: "engine switches not taken, SGLang gives no reason",
        Answer.NOT_YET: "engine switches that SGLang decides at a step",
        Answer.SILENT: "engine switches of which SGLang does not say whether it took them",
    }
    return [f"{words[answer]}: {', '.join(slot.slot for slot in slots)}"]


def install(plan: Plan) -> Watch | None:
    """Watch for a plan, in place of an earlier watch; None where no engine-backed slot is on."""
    remove()
    if not any(entry.provided.slot.engine_backed for entry in plan.active):
        return None
    watch = Watch(plan)
    logging.getLogger(ENGINE_LOGGER).addHandler(watch)
    return watch


def remove() -> None:
    """Stop watching."""
    engine = logging.getLogger(ENGINE_LOGGER)
    for handler in [handler for handler in engine.handlers if isinstance(handler, Watch)]:
        engine.removeHandler(handler)
