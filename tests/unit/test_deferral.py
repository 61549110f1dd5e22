"""The host's part of a deferred commit: what has to be written before which event."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sgl_mega_plugin.deferral import Deferral, Todo


def deferral(pending: int = 0, graphs: tuple[int, ...] = (1, 2, 4)) -> Deferral:
    """Of a buffer of four rows."""
    made = Deferral(4)
    for rows in graphs:
        made.captured(rows)
    made.staged(pending)
    return made


@pytest.mark.parametrize("pending", [0, 1, 2, 4])
@pytest.mark.parametrize(
    "event",
    [Deferral.before_verify, Deferral.before_prefill, Deferral.before_move, Deferral.before_recapture],
    ids=lambda event: event.__name__,
)
def test_what_could_read_or_overwrite_is_preceded_by_the_write(event: Callable[[Deferral], Todo], pending: int) -> None:
    made = deferral(pending)
    assert event(made) is (Todo.WRITE if pending else Todo.NOTHING)
    assert made.pending == frozenset()
    assert event(made) is Todo.NOTHING, "it was asked for twice"


@pytest.mark.parametrize(
    ("pending", "graph_rows", "todo"),
    [
        (0, 2, Todo.NOTHING),
        (0, None, Todo.NOTHING),
        (2, 2, Todo.REPLAY),
        (2, 4, Todo.REPLAY),
        (2, 1, Todo.WRITE),  # its head writes one row of two
        (2, None, Todo.WRITE),  # an eager draft
        (2, 3, Todo.WRITE),  # no graph that was captured with the write
    ],
)
def test_a_draft(pending: int, graph_rows: int | None, todo: Todo) -> None:
    made = deferral(pending)
    assert made.before_draft(graph_rows) is todo
    assert made.pending == frozenset()
    assert made.before_draft(graph_rows) is Todo.NOTHING


def test_dropped_rows_are_not_pending_and_are_named_once() -> None:
    made = deferral(4)
    assert made.drop([1, 3, 9]) == (1, 3)
    assert made.drop([1]) == ()
    assert made.pending == {0, 2}
    assert made.before_draft(2) is Todo.WRITE, "row 2 is not in a graph of two"
    made.staged(4)
    made.drop([2, 3])
    assert made.before_draft(2) is Todo.REPLAY
    made.staged(2)
    assert made.drop() == (0, 1)
    assert made.before_prefill() is Todo.NOTHING


def test_after_a_recapture_only_new_graphs_write() -> None:
    made = deferral(2)
    assert made.before_recapture() is Todo.WRITE
    made.captured(4)
    made.disarmed()
    made.staged(1)
    assert made.before_draft(2) is Todo.WRITE
    made.staged(1)
    assert made.before_draft(4) is Todo.REPLAY
    made.staged(3)
    made.disarmed()
    assert made.before_verify() is Todo.NOTHING


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: Deferral(0), ValueError, "staged_rows: 0; must be at least 1"),
        (lambda: deferral().staged(5), ValueError, "live_rows: 5; must be 0 to 4"),
        (lambda: deferral().staged(-1), ValueError, "live_rows: -1; must be 0 to 4"),
        (lambda: deferral(2).staged(1), RuntimeError, r"staged over rows \[0, 1\], which are not written"),
        (lambda: deferral(1).captured(8), RuntimeError, r"captured while rows \[0\] are staged"),
    ],
)
def test_what_would_lose_a_staging_is_an_error(call: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()
