"""``sgl-mega run``: the demo model with the embedded engine, plain, speculative, and with slots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sgl_mega_plugin.cli.machine import check_backend, check_device, embedded_host, interpret, need_torch, torch_dtype
from sgl_mega_plugin.cli.output import FAILED, JsonOption, WrongUseError, answers, print_json, stderr, stdout, table
from sgl_mega_plugin.contract import Backend, Plan
from sgl_mega_plugin.contract.selection import SLOTS_VARIABLE
from sgl_mega_plugin.embedded.request import Request, RequestError
from sgl_mega_plugin.plan import make_plan
from sgl_mega_plugin.registry import Registry

if TYPE_CHECKING:
    from sgl_mega_plugin.embedded.compare import OnRun, Report
    from sgl_mega_plugin.embedded.models import DemoModels

PROMPTS = (
    "Why does bread dough rise more slowly in a cold kitchen? Answer in two sentences.",
    "List five things to check on a bicycle before a long ride.",
    "Write a short note that thanks a neighbour for watering the plants.",
)
#: Largest logit margin that rounding explains. This model's logits reach 42 (72 prefixes of 8 answers), and
#: from 32 to 64 neighbours are 2**-2 (bfloat16) or 2**-5 (float16) apart; each of two logits may move by one step.
ROUNDING = {"float32": 0.0, "float16": 2 * 2.0**-5, "bfloat16": 2 * 2.0**-2}


class Dtype(StrEnum):
    """Dtypes of the demo models."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def command(
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to answer; repeat it for several. Three built-in ones by default.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=-1, help="Sample among so many tokens; -1 is all, 1 is greedy.")] = -1,
    top_p: Annotated[float, typer.Option(max=1.0, help="Sample among the likeliest tokens of this mass.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Leave out tokens below this part of the likeliest's probability.")
    ] = 0.0,
    slots: Annotated[
        str | None,
        typer.Option(help="Slot list, such as 'default,-markov' or 'none'; else that of " + SLOTS_VARIABLE + "."),
    ] = None,
    device: Annotated[str, typer.Option(help="'cpu', 'cuda' or 'cuda:N'.")] = "cpu",
    dtype: Annotated[
        Dtype | None, typer.Option(help="float32 on a CPU and bfloat16 on CUDA unless given.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampled tokens.")] = 0,
    gamma: Annotated[
        int | None, typer.Option(min=1, max=7, help="Draft tokens a step; the draft's own number by default.")
    ] = None,
    interpreter: Annotated[
        bool,
        typer.Option("--interpreter", help="On a CPU, interpret the slots' Triton kernels: about a minute a step."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate with SmolLM2-135M three times: plain, with DSpark speculation, and with slots too.

    Shows the text, tokens/s, the accepted length (tokens a step, bonus included), which slots ran on what, and
    whether the outputs agree. On CUDA a slot runs its kernel; on a CPU its reference in torch, or with
    --interpreter its kernel.

    Exit code 1 if greedy outputs differ. In bfloat16 and float16, where the number of rows in a step changes the
    rounding, a difference is shown with the margin between the two best logits, and the exit code is 0 if rounding
    explains every one. At temperature > 0 runs draw other numbers, so nothing is claimed.
    """
    with answers(as_json):
        texts = list(PROMPTS) if prompt is None else prompt
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        requests = _requests(texts, max_tokens, sampling)
        isa = check_device(device)
        chosen = dtype or (Dtype.FLOAT32 if isa == "cpu" else Dtype.BFLOAT16)
        backend = _backend(isa, interpreter=interpreter)
        check_backend(device, backend)
        plan = _plan(isa, backend, chosen, slots, max_batch=len(requests))
        if backend is Backend.INTERPRETER:
            interpret()
        models = _models(device, chosen, gamma)
        with _progress(len(requests) * max_tokens, as_json=as_json) as on_run:
            report = _compare(models, requests, plan=plan, gamma=gamma, seed=seed, on_run=on_run)
        greedy = all(request.step_temperature == 0 for request in requests)
        settings = {"prompts": texts, **sampling, "gamma": gamma or models.draft.config.gamma}
        answer = _answer(report, settings, greedy=greedy)
    if as_json:
        print_json(answer)
    else:
        _print(answer, plan)
    if answer["identical"] is False and not answer["within_rounding"]:
        raise typer.Exit(FAILED)


def _requests(texts: list[str], max_tokens: int, sampling: dict[str, Any]) -> list[Request]:
    blank = [index for index, text in enumerate(texts) if not text.strip()]
    if blank:
        raise WrongUseError(f"--prompt number {blank[0] + 1} is blank: write a question or an instruction")
    try:
        return [Request(text=text, max_new_tokens=max_tokens, **sampling) for text in texts]
    except ValidationError as error:
        first = error.errors()[0]
        raise WrongUseError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {first['input']!r}") from None


def _backend(isa: str, *, interpreter: bool) -> Backend:
    if interpreter:
        return Backend.INTERPRETER
    return Backend.REFERENCE if isa == "cpu" else Backend.KERNEL


def _plan(isa: str, backend: Backend, dtype: Dtype, slots: str | None, *, max_batch: int) -> Plan:
    environ = dict(os.environ) | ({SLOTS_VARIABLE: slots} if slots is not None else {})
    host = embedded_host(isa=isa, backend=backend, dtype=dtype.value, max_batch=max_batch)
    plan = make_plan(registry=Registry.discover(), environ=environ, host=host)
    if plan.refusals():
        raise WrongUseError("slots that were named cannot run here. " + "; ".join(plan.refusals()))
    return plan


def _models(device: str, dtype: Dtype, gamma: int | None) -> DemoModels:
    need_torch()
    from sgl_mega_plugin.embedded import load_demo

    try:
        models = load_demo(device, torch_dtype(dtype.value))
    except ImportError as error:
        raise WrongUseError(
            f"the demo model's readers are missing ({error}): pip install gguf tokenizers safetensors"
        ) from None
    except FileNotFoundError as error:
        raise WrongUseError(str(error)) from None
    trained = models.draft.config.gamma
    if gamma is not None and gamma > trained:
        raise WrongUseError(f"--gamma {gamma} is more than the {trained} tokens that the draft was trained for")
    return models


def _compare(
    models: DemoModels, requests: list[Request], *, plan: Plan, gamma: int | None, seed: int, on_run: OnRun
) -> Report:
    from sgl_mega_plugin.embedded import compare_runs

    try:
        return compare_runs(models, requests, plan=plan, gamma=gamma, seed=seed, on_run=on_run)
    except RequestError as error:
        raise WrongUseError(str(error)) from None


@contextmanager
def _progress(total: int, *, as_json: bool) -> Iterator[OnRun]:
    """A bar for each run on stderr where that is a terminal, else a line; nothing with ``--json``."""
    console = Console(stderr=True, quiet=True) if as_json else stderr()
    if not console.is_terminal:

        def announce(name: str) -> None:
            console.print(f"running: {name}")

        yield announce
        return
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:

        def begin(name: str) -> Any:
            task = bars.add_task(name, total=total)
            return lambda _request, tokens: bars.advance(task, len(tokens))

        yield begin


def _answer(report: Report, settings: dict[str, Any], *, greedy: bool) -> dict[str, Any]:
    """The report as JSON, with the settings; ``identical`` is null where nothing is claimed."""
    found = report.model_dump(mode="json")
    margins = [difference["logit_margin"] for difference in found["differences"]]
    explained = all(margin <= ROUNDING[report.dtype] for margin in margins)
    return (
        found
        | settings
        | {
            "identical": report.identical if greedy else None,
            "within_rounding": explained if greedy else None,
        }
    )


def _print(answer: dict[str, Any], plan: Plan) -> None:
    console = stdout()
    console.print(
        f"[bold]{answer['model']}[/bold] on {answer['device']} in {answer['dtype']}, temperature "
        f"{answer['temperature']:g}, {answer['gamma']} draft tokens a step\n"
    )
    _print_texts(console, answer)
    runs = table("run", "tokens", "seconds", "tokens/s", "accepted length", right=_RIGHT)
    for name, run in answer["runs"].items():
        count = sum(map(len, run["tokens"]))
        length = run["accept_length"] if name != "plain" else None
        runs.add_row(
            name, str(count), f"{run['seconds']:.2f}", f"{run['tokens_per_s']:.1f}", f"{length:.2f}" if length else "-"
        )
    console.print(runs, "")
    _print_slots(console, answer, plan)
    if answer["differences"]:
        _print_differences(console, answer)
    console.print(_verdict(answer), markup=False)


_RIGHT = ("tokens", "seconds", "tokens/s", "accepted length")


def _print_texts(console: Console, answer: dict[str, Any]) -> None:
    """Each prompt with its answer; with every run's where they differ."""
    for index, prompt in enumerate(answer["prompts"]):
        console.print(f"[bold cyan]{index + 1}[/bold cyan]  [bold]{escape(prompt)}[/bold]")
        texts = {name: run["text"][index] for name, run in answer["runs"].items()}
        if len(set(texts.values())) == 1:
            texts = {"": texts["slots"]}
        for name, text in texts.items():
            label = f"[dim]{name}[/dim]\n" if name else ""
            console.print(Padding(label + escape(text.strip()), (0, 0, 1, 3), expand=False))


def _print_slots(console: Console, answer: dict[str, Any], plan: Plan) -> None:
    ran = table("slot", "stage", "ran on")
    stages = {entry.name: entry.provided.slot.stage.value for entry in plan.active}
    where = {"kernel": "its Triton kernel", "interpreter": "its Triton kernel, interpreted", "reference": "torch"}
    for slot in answer["slots"]:
        ran.add_row(slot["name"], stages[slot["name"]], f"{where[slot['backend']]} ({slot['backend']})")
    console.print(ran if answer["slots"] else "no slot ran: the slot list chooses none", "")
    for name, reason in answer["idle"].items():
        console.print(f"slot '{name}' was not called: {reason}", "", markup=False)


def _print_differences(console: Console, answer: dict[str, Any]) -> None:
    rows = table("prompt", "at token", "runs", "tokens", "logit margin", right=("prompt", "at token", "logit margin"))
    for found in answer["differences"]:
        rows.add_row(
            str(found["request"] + 1),
            str(found["position"]),
            " / ".join(found["runs"]),
            " / ".join("end" if token is None else str(token) for token in found["tokens"]),
            f"{found['logit_margin']:.4f}",
        )
    console.print(rows, "")


def _verdict(answer: dict[str, Any]) -> str:
    if answer["identical"] is None:
        return "identical: not claimed at temperature > 0, where plain and speculative runs draw other numbers"
    if answer["identical"]:
        return "identical: true"
    bound = ROUNDING[answer["dtype"]]
    if answer["within_rounding"]:
        return f"identical: false, as far as {answer['dtype']} rounds (every logit margin <= {bound:g})"
    return f"identical: false (a logit margin above {bound:g}, what {answer['dtype']} rounding explains)"
