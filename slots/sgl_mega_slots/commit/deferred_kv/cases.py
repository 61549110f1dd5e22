"""Conformance cases of `deferred_kv`: those of `context_kv`, and what disarms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.commit.context_kv import cases as context_cases

#: Buffers are compared whole, and the lengths are read before they are cleared.
_KEEP = frozenset({"out_commit_lens", "out_keys", "out_values"})


def staged(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `context_kv` as those of this seam."""
    return {"out_commit_lens" if name == "commit_lens" else name: value for name, value in values.items()}


def _of(case: Case) -> Case:
    return Case(case.id, lambda device: staged(case.make(device)), keep=_KEEP, kernel_only=case.kernel_only)


def _case(id_: str, **kwargs: Any) -> Case:
    return Case(id_, lambda device: staged(context_cases.arguments(device, **kwargs)), keep=_KEEP)


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    for case in context_cases.cases():
        yield _of(case)
    yield _case("lengths_out_of_range", locations=[[5, 6], [7, 8]], commit_lens=[-3, 0x7FFFFFFF])
    yield _case("armed_rows_that_write_nothing", locations=[[0, 0], [-1, -1], [7, 8]], commit_lens=[2, 1, 2])
