"""A plan run in torch: every SM's units in an order that their inputs allow, rounded where the kernel rounds.

The oracle for the kernel and for the plan itself: a unit runs once every value that it reads is there, so a plan that
deals a unit to nobody, or in an order in which SMs wait for each other, comes to a stand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sgl_mega_slots.target.target_step.plan import LAYER, Op, StepPlan
from sgl_mega_slots.target.target_step.reference import attend, in_cache, read, rotate, slots_of, store
from sgl_mega_slots.target.target_step.shape import GROUP
from sgl_mega_slots.target.target_step.weights import Cache, StepInputs, Weights


@dataclass(frozen=True)
class Task:
    """A unit of an operation on an SM."""

    op: Op
    layer: int
    unit: int
    sm: int


@dataclass
class Interpreted:
    """What a step left behind; ``logits`` or ``last_hidden`` is empty."""

    logits: Tensor
    last_hidden: Tensor
    tapped: Tensor
    order: list[Task] = field(default_factory=list)


class StuckError(RuntimeError):
    """No SM can go on: they wait for values that nobody writes."""


def interpret(plan: StepPlan, weights: Weights, cache: Cache, inputs: StepInputs, *, seed: int) -> Interpreted:
    """Run a step; SMs take turns by ``seed``. Writes this step's keys and values into the cache.

    Raises:
        StuckError: units are left, and none of them can run.
    """
    step = _Step(plan, weights, cache, inputs)
    queues = {sm: list(reversed(list(_tasks(plan, sm)))) for sm in range(plan.sms)}
    choose = random.Random(seed)
    while any(queues.values()):
        ready = [sm for sm, queue in queues.items() if queue and step.ready(queue[-1])]
        if not ready:
            waiting = sorted({f"{queue[-1].op.name} of layer {queue[-1].layer}" for queue in queues.values() if queue})
            raise StuckError(f"no SM can go on; they wait for: {', '.join(waiting)}")
        task = queues[choose.choice(ready)].pop()
        step.run(task)
        step.found.order.append(task)
    return step.found


def _tasks(plan: StepPlan, sm: int) -> Iterator[Task]:
    """An SM's units in its order."""

    def of(op: Op, layer: int) -> Iterator[Task]:
        share = plan.share(op, sm)
        return (Task(op, layer, unit, sm) for unit in range(share.first, share.first + share.count))

    yield from of(Op.EMBED, 0)
    for layer in range(plan.shape.layers):
        for op in LAYER:
            yield from of(op, layer)
    yield from of(Op.HEAD if plan.head else Op.FINAL, plan.shape.layers)


class _Step:
    def __init__(self, plan: StepPlan, weights: Weights, cache: Cache, inputs: StepInputs) -> None:
        self.plan, self.cache, self.inputs = plan, cache, inputs
        self.weights = replace(weights, layers=tuple(layer.dequantised() for layer in weights.layers))
        shape, rows = plan.shape, plan.rows

        def empty(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.full((rows, width), float("nan"), dtype=dtype)

        self.residual = empty(shape.hidden, torch.float32)
        self.given = {
            Op.QKV: empty(shape.hidden),
            Op.O: empty(shape.q_size),
            Op.GATE_UP: empty(shape.hidden),
            Op.DOWN: empty(shape.intermediate),
        }
        self.squares = {Op.QKV: empty(shape.hidden, torch.float32), Op.GATE_UP: empty(shape.hidden, torch.float32)}
        self.projected = empty(shape.qkv_size, torch.float32)
        self.split_arrivals: dict[tuple[int, int], int] = {}
        self.there = {(Op.EMBED, 0): torch.zeros(plan.units_of(Op.EMBED), dtype=torch.bool)}
        for layer in range(shape.layers):
            self.there |= {(op, layer): torch.zeros(plan.units_of(op), dtype=torch.bool) for op in LAYER}
        self.found = Interpreted(
            logits=empty(shape.vocab if plan.head else 0),
            last_hidden=empty(0 if plan.head else shape.hidden),
            tapped=empty(len(plan.taps) * shape.hidden),
        )

    # --- order

    def ready(self, task: Task) -> bool:
        """Whether all that the task reads is there."""
        return all(self.there[need].all() for need in self._needs(task))

    def _needs(self, task: Task) -> Iterator[tuple[Op, int]]:
        """Whose outputs: operations with their layers."""
        if task.op is Op.EMBED:
            return
        if task.op is Op.QKV or task.layer == self.plan.shape.layers:
            yield (Op.DOWN, task.layer - 1) if task.layer else (Op.EMBED, 0)
        else:
            yield LAYER[LAYER.index(task.op) - 1], task.layer

    def _done(self, op: Op, layer: int, unit: int) -> None:
        self.there[op, layer][unit] = True

    # --- work

    def run(self, task: Task) -> None:
        if task.op is Op.EMBED:
            self._residual(task, self.weights.embedding[self.inputs.input_ids][:, self._columns(task)].float())
        elif task.op in (Op.O, Op.DOWN):
            columns = self._columns(task)
            matrix = getattr(self.weights.layers[task.layer], "o" if task.op is Op.O else "down")
            self._residual(task, self.residual[:, columns] + self._product(task.op, matrix[columns]))
        elif task.op is Op.ATTENTION:
            self._attention(task)
        else:
            self._projection(task)

    def _columns(self, task: Task) -> slice:
        return slice(task.unit * GROUP, (task.unit + 1) * GROUP)

    def _product(self, op: Op, rows: Tensor) -> Tensor:
        return self.given[op].float() @ rows.float().T

    def _scale(self, op: Op) -> Tensor:
        mean = self.squares[op].sum(-1, keepdim=True) / self.plan.shape.hidden
        return torch.rsqrt(mean + self.plan.shape.eps)

    def _residual(self, task: Task, x: Tensor) -> None:
        columns, layers = self._columns(task), self.weights.layers
        self.residual[:, columns] = x
        before = 0 if task.op is Op.EMBED else task.layer + 1
        if task.op is Op.O:
            reader, norm = Op.GATE_UP, layers[task.layer].middle_norm
        else:
            reader, norm = Op.QKV, layers[before].input_norm if before < len(layers) else self.weights.final_norm
            if before in self.plan.taps:
                width = self.plan.shape.hidden
                self.found.tapped.view(-1, len(self.plan.taps), width)[:, self.plan.taps.index(before), columns] = (
                    x.bfloat16()
                )
        self.given[reader][:, columns] = (x * norm[columns].float()).bfloat16()
        self.squares[reader][:, columns] = x.square()
        self._done(task.op, task.layer, task.unit)

    def _projection(self, task: Task) -> None:
        columns = self._columns(task)
        if task.op is Op.QKV:
            layer = self.weights.layers[task.layer]
            self.projected[:, columns] = self._product(Op.QKV, layer.qkv[columns]) * self._scale(Op.QKV)
            if layer.qkv_bias is not None:
                self.projected[:, columns] += layer.qkv_bias[columns].float()
        elif task.op is Op.GATE_UP:
            gates, ups = self.weights.layers[task.layer].gate_up.chunk(2)
            gate, up = (self._product(Op.GATE_UP, part[columns]) * self._scale(Op.GATE_UP) for part in (gates, ups))
            self.given[Op.DOWN][:, columns] = (torch.nn.functional.silu(gate) * up).bfloat16()
        elif task.op is Op.HEAD:
            assert self.weights.head is not None
            product = self._product(Op.QKV, self.weights.head[columns])
            self.found.logits[:, columns] = (product * self._scale(Op.QKV)).bfloat16()
            return
        else:
            last = self.residual[:, columns] * self._scale(Op.QKV) * self.weights.final_norm[columns].float()
            self.found.last_hidden[:, columns] = last.bfloat16()
            return
        self._done(task.op, task.layer, task.unit)

    def _attention(self, task: Task) -> None:
        """A unit's part; the last part of a group computes all of it, as the parts together do."""
        plan, inputs = self.plan, self.inputs
        unit = plan.unit(task.unit)
        key = (task.layer, unit.group)
        self.split_arrivals[key] = self.split_arrivals.get(key, 0) + 1
        rows = slice(unit.request * plan.tokens, (unit.request + 1) * plan.tokens)
        query, keys, values = self._heads(task.layer, unit.first_head, unit.kv_head, rows)
        layer_keys, layer_values = self.cache.keys[task.layer], self.cache.values[task.layer]
        if unit.first_head % (plan.shape.q_heads // plan.shape.kv_heads) == 0:
            stored = inputs.cache_locs[rows] > 0  # 0 is the padding slot
            at = inputs.cache_locs[rows][stored]
            for cache, new in ((layer_keys, keys), (layer_values, values)):
                store(cache[:, unit.kv_head], at, new[stored, 0])
        if self.split_arrivals[key] < plan.splits:
            return
        at = slots_of(inputs, unit.request)
        out = attend(
            query,
            torch.cat([read(layer_keys[:, unit.kv_head, None], at).float(), keys]),
            torch.cat([read(layer_values[:, unit.kv_head, None], at).float(), values]),
            causal=plan.causal,
        )
        first = unit.first_head * plan.shape.head_dim
        self.given[Op.O][rows, first : first + out[0].numel()] = out.flatten(1).bfloat16()
        for split in range(plan.splits):
            self._done(Op.ATTENTION, task.layer, unit.group * plan.splits + split)

    def _heads(self, index: int, first: int, kv_head: int, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[T, heads, head dim]``, this step's key and value ``[T, 1, head dim]``: fp32, already rounded."""
        shape, layer = self.plan.shape, self.weights.layers[index]
        query, key, value = (
            part.unflatten(1, (-1, shape.head_dim))
            for part in self.projected[rows].split([shape.q_size, shape.kv_size, shape.kv_size], dim=-1)
        )
        query = query[:, first : first + self.plan.unit_heads]
        key, value = key[:, kv_head, None], value[:, kv_head, None]
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = self._normed(query, layer.q_norm), self._normed(key, layer.k_norm)
        rotary = self.weights.rotary[self.inputs.positions[rows]]
        cache = self.cache.keys[index]
        key, value = (in_cache(cache, x).float() for x in (rotate(key, rotary), value))
        return rotate(query, rotary).bfloat16().float(), key, value

    def _normed(self, x: Tensor, norm: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.plan.shape.eps) * norm.float()
