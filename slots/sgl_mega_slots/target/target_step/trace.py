"""When each SM began and ended which operation of a traced step: where a step's time goes.

A plan with ``trace`` is another binary, a little slower than the one that users run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_mega_slots.target.target_step.plan import LAYER, Op, StepPlan

#: An SM's clocks of every mark, ``[marks, 4]``.
Clocks = Sequence[Sequence[int]]

_ORDER = (Op.QKV, Op.O, Op.GATE_UP, Op.DOWN, Op.ATTENTION)


@dataclass(frozen=True)
class Span:
    """An operation on an SM. Times are nanoseconds since the first SM began the step."""

    sm: int
    layer: int
    op: Op
    began: float
    input_there: float  # the first part of its input; of attention the queries, keys and values
    multiplied: float  # sums complete; of attention this part of the context done
    ended: float  # results told to other SMs

    @property
    def waited(self) -> float:
        return self.input_there - self.began


def spans(plan: StepPlan, marks: Sequence[Clocks]) -> list[Span]:
    """The operations of a traced step, by SM and in their order.

    Args:
        marks: ``[sms, marks, 4]`` clocks, ``StepBuffers.marks`` as lists.
    """
    zero = min(lines[0][1] for lines in marks)
    found = []
    for sm, (step, *lines) in enumerate(marks):
        began, began_ns, ended, ended_ns = step
        rate = (ended_ns - began_ns) / max(ended - began, 1)

        def time(clock: int, start: int = began, at: int = began_ns, rate: float = rate) -> float:
            return at - zero + (clock - start) * rate

        for number, line in enumerate(lines):
            layer, op = divmod(number, len(LAYER))
            if all(line):
                which = Op.HEAD if layer == plan.shape.layers else _ORDER[op]
                found.append(Span(sm, layer, which, *(time(clock) for clock in line)))
    return sorted(found, key=lambda span: (span.sm, span.began))


@dataclass(frozen=True)
class Mean:
    """An operation's times over SMs and layers, in nanoseconds."""

    op: Op
    waited: float
    multiplied: float
    finished: float


def means(found: Sequence[Span]) -> list[Mean]:
    """What an operation takes on an SM on average: waiting for its input, the products, and the rest."""
    by_op: dict[Op, list[Span]] = {}
    for span in found:
        by_op.setdefault(span.op, []).append(span)
    return [
        Mean(
            op,
            waited=sum(span.waited for span in group) / len(group),
            multiplied=sum(span.multiplied - span.input_there for span in group) / len(group),
            finished=sum(span.ended - span.multiplied for span in group) / len(group),
        )
        for op, group in sorted(by_op.items())
    ]
