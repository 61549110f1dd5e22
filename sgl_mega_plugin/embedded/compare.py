"""Run the same requests plain, speculative, and with slots, and say whether the outputs agree.

What ``sgl-mega run`` prints and the closed loop that tests use. Greedy outputs must agree between
all runs. A sampled request draws other numbers with speculation than without, so it is compared
between the two speculative runs only, which share theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from pydantic import Field

from sgl_mega_plugin.contract import Plan, Record
from sgl_mega_plugin.embedded.engine import Engine, Models, OnTokens
from sgl_mega_plugin.embedded.request import Completion, Request, output_limit

RUNS = ("plain", "speculative", "slots")
_WARM_UP_TOKENS = 3  # the prefill's and a step's

#: Called before each run with its name; returns what the run reports its tokens to.
OnRun = Callable[[str], OnTokens | None]


class NamedModels(Models, Protocol):
    """Models with a name for the report."""

    @property
    def name(self) -> str: ...


class Run(Record):
    """One run; lists are in the order of the requests."""

    tokens: tuple[tuple[int, ...], ...]
    text: tuple[str, ...]
    seconds: float
    tokens_per_s: float
    accept_length: float | None  # mean over steps, bonus included


class Difference(Record):
    """The first position at which a request's output departs from the run it is compared with."""

    request: int
    position: int
    runs: tuple[str, str]
    tokens: tuple[int | None, int | None]  # None: that run had ended
    logit_margin: float  # between the best two logits there: small where rounding decides


class SlotRun(Record):
    """A slot that ran, and what ran it."""

    name: str
    seam: str
    backend: str


class Report(Record):
    """``identical``: no request differs between runs that must agree; see the module docstring."""

    model: str
    device: str
    dtype: str
    runs: dict[str, Run]
    identical: bool
    accept_length: float | None
    slots: tuple[SlotRun, ...]
    idle: dict[str, str] = Field(default_factory=dict)  # slots of the plan that this engine does not call, with why
    differences: tuple[Difference, ...]


def compare_runs(
    models: NamedModels,
    requests: Sequence[Request],
    *,
    plan: Plan,
    gamma: int | None = None,
    max_batch: int = 8,
    max_context: int | None = None,
    seed: int = 0,
    on_run: OnRun | None = None,
) -> Report:
    """One :class:`Report`. Raises :class:`RequestError` before anything runs if a request cannot be served.

    Each run has a new engine with the same ``seed``, warmed up by a few tokens.
    """
    if not requests:
        raise ValueError("no requests to compare: pass at least one")

    def engine(name: str) -> Engine:
        return Engine(
            models,
            plan=plan if name == "slots" else None,
            speculative=name != "plain",
            gamma=gamma if name != "plain" else None,
            max_batch=min(max_batch, len(requests)),
            max_context=max_context,
            seed=seed,
        )

    # First, so that a plan that cannot be served is known before minutes have passed.
    backend = plan.host.backend.value
    stages = engine("slots").stages
    slots = [SlotRun(name=slot, seam=seam, backend=backend) for seam, slot in stages.slots]
    runs = {name: _run(engine(name), requests, on_run(name) if on_run is not None else None) for name in RUNS}
    differences = tuple(_differences(engine("plain"), requests, runs))
    return Report(
        model=models.name,
        device=str(models.target.lm_head_weight.device),
        dtype=str(models.target.lm_head_weight.dtype).removeprefix("torch."),
        runs=runs,
        identical=not differences,
        accept_length=runs["slots"].accept_length,
        slots=tuple(slots),
        idle=dict(stages.idle),
        differences=differences,
    )


def _run(engine: Engine, requests: Sequence[Request], on_tokens: OnTokens | None) -> Run:
    engine.check(requests)
    _warm_up(engine, requests)
    seeded = [
        request if request.seed is not None else request.model_copy(update={"seed": index})
        for index, request in enumerate(requests)
    ]
    _synchronise(engine.device)
    start = time.perf_counter()
    completions = engine.generate(seeded, on_tokens=on_tokens)
    _synchronise(engine.device)
    seconds = time.perf_counter() - start
    return _summary(completions, seconds)


def _warm_up(engine: Engine, requests: Sequence[Request]) -> None:
    """Compile and cache: on a GPU with the full batch, as kernels are specialised by its size."""

    def few(request: Request) -> int:
        limit, _ = output_limit(request, len(engine.prompt_ids(request)), engine.max_context)
        return min(limit, _WARM_UP_TOKENS)

    batch = requests[: engine.max_batch] if engine.device.startswith("cuda") else requests[:1]
    engine.generate([request.model_copy(update={"max_new_tokens": few(request), "seed": 0}) for request in batch])


def _summary(completions: Sequence[Completion], seconds: float) -> Run:
    steps = [length for completion in completions for length in completion.accept_lengths]
    tokens = tuple(completion.tokens for completion in completions)
    return Run(
        tokens=tokens,
        text=tuple(completion.text for completion in completions),
        seconds=seconds,
        tokens_per_s=sum(map(len, tokens)) / seconds,
        accept_length=sum(steps) / len(steps) if steps else None,
    )


def _differences(engine: Engine, requests: Sequence[Request], runs: dict[str, Run]) -> Iterator[Difference]:
    for index, request in enumerate(requests):
        pairs = [("speculative", "slots")]
        if request.step_temperature == 0:
            pairs.insert(0, ("plain", "speculative"))
        for first, second in pairs:
            left, right = runs[first].tokens[index], runs[second].tokens[index]
            if left == right:
                continue
            position = _first_difference(left, right)
            prefix = [*engine.prompt_ids(request), *left[:position]]
            best = engine.next_logits(prefix).float().topk(2).values.tolist()
            yield Difference(
                request=index,
                position=position,
                runs=(first, second),
                tokens=(_at(left, position), _at(right, position)),
                logit_margin=best[0] - best[1],
            )


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
