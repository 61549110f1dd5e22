"""The stages of a decode step, in the order in which they run."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """A part of a decode step that slots may replace."""

    DRAFT = "draft"
    VERIFY_ACCEPT = "verify_accept"
    GLUE = "glue"
    COMMIT = "commit"
    TARGET = "target"

    @property
    def summary(self) -> str:
        """One line for people: what happens in this stage."""
        return _SUMMARIES[self]


_SUMMARIES = {
    Stage.DRAFT: "propose a block of draft tokens",
    Stage.VERIFY_ACCEPT: "decide what of the block stands",
    Stage.GLUE: "inputs, positions, cache locations, metadata, relays between the forwards",
    Stage.COMMIT: "write what the accepted tokens leave behind",
    Stage.TARGET: "the target model's own forward",
}
