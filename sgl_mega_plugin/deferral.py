"""When a deferred commit has to be written: the host's part of the slots `kv_staging` and `deferred_kv`.

A verify stages what its commit needs (seam ``kv_staging``); the head of the next draft's graph writes and disarms it
(seam ``staged_kv``). Everything else that could come between asks here first. The rules that this keeps:

- a staging is written at most once, and before anything reads or overwrites the draft's KV;
- what is dropped is never written, so a slot that has a new owner is left to it;
- a staging is not replaced while it is pending.

Used by the binding of an engine, which does what :class:`Todo` says before it goes on. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Todo(StrEnum):
    """What the caller does before the event that it announced."""

    NOTHING = "nothing"
    WRITE = "write"  # call staged_kv on every staged row, outside any graph
    REPLAY = "replay"  # replay the draft graph that was announced: its head writes


class Deferral:
    """The host's view of one staging buffer of M rows.

    The ``before_*`` methods return a :class:`Todo` and take it for done: the caller carries it out at once, on the
    stream of the forwards. Rows are those of the verify batch that staged them.
    """

    def __init__(self, staged_rows: int) -> None:
        """``staged_rows`` is M. Raises ValueError below 1."""
        if staged_rows < 1:
            raise ValueError(f"staged_rows: {staged_rows}; must be at least 1")
        self._most = staged_rows
        self._pending: set[int] = set()
        self._graphs: set[int] = set()

    @property
    def pending(self) -> frozenset[int]:
        """Rows that are staged, not dropped and not written."""
        return frozenset(self._pending)

    def captured(self, graph_rows: int) -> None:
        """A draft graph of that many rows was captured with ``staged_kv`` at its head, on a disarmed buffer.

        Raises:
            RuntimeError: a staging is pending; warm-ups would have written it. Capture before serving, or write first.
        """
        if self._pending:
            raise RuntimeError(f"a draft graph was captured while rows {sorted(self._pending)} are staged; write first")
        self._graphs.add(graph_rows)

    def before_verify(self) -> Todo:
        """A verify that stages is about to run: its projection overwrites the KV that a pending staging refers to."""
        return self._write()

    def staged(self, live_rows: int) -> None:
        """A verify of that many live rows has staged; its padding rows have commit length 0.

        Raises:
            ValueError: more rows than the buffer has.
            RuntimeError: a staging is pending: ``before_verify`` was not asked, and its KV is lost.
        """
        if not 0 <= live_rows <= self._most:
            raise ValueError(f"live_rows: {live_rows}; must be 0 to {self._most}, the rows of the staging buffer")
        if self._pending:
            raise RuntimeError(f"staged over rows {sorted(self._pending)}, which are not written; ask before_verify")
        self._pending = set(range(live_rows))

    def before_draft(self, graph_rows: int | None) -> Todo:
        """A draft is about to run, in a graph of that many rows, or eagerly (None).

        A graph writes by itself if it was captured so and reaches every pending row.
        """
        if graph_rows is None or graph_rows not in self._graphs or max(self._pending, default=0) >= graph_rows:
            return self._write()
        todo = Todo.REPLAY if self._pending else Todo.NOTHING
        self._pending.clear()
        return todo

    def before_prefill(self) -> Todo:
        """A prefill is about to run: it may read the prefix that is staged, or write slots that a request gave back."""
        return self._write()

    def before_move(self) -> Todo:
        """KV is about to be read, moved or sent from outside the forwards: off to the host, to another server."""
        return self._write()

    def drop(self, rows: Iterable[int] | None = None) -> tuple[int, ...]:
        """Requests are aborted or retracted, or the cache is flushed: their slots may get another owner.

        ``rows`` of the staging, all of them by default. Returns the rows whose staged commit length the caller sets
        to 0 on the device before it gives the slots away; rows that are not pending are not among them.
        """
        gone = self._pending if rows is None else self._pending.intersection(rows)
        dropped = tuple(sorted(gone))
        self._pending = self._pending.difference(dropped)
        return dropped

    def before_recapture(self) -> Todo:
        """The graphs are about to be given up and captured anew; warm-ups will stage placeholder inputs."""
        self._graphs.clear()
        return self._write()

    def disarmed(self) -> None:
        """The caller set every staged commit length to 0, as it does after captures and warm-ups."""
        self._pending.clear()

    def _write(self) -> Todo:
        todo = Todo.WRITE if self._pending else Todo.NOTHING
        self._pending.clear()
        return todo
