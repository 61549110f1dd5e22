"""Measure `target_step` or `draft_step` on a GPU: GPU time beside the time its bytes need, its errors, where time goes.

    python tools/measure_target_step.py qwen3-8b --out DIR [--batch 1] [--context 1024] [--replays 200] [--trace]
        [--weights bf16] [--kv bf16] [--draft]

Times are CUDA graph replays with random weights, which are larger than L2 and so always cold. Errors are against the
reference in fp32. With ``--draft`` it is the forward of the model's draft, `draft_step`. Appends a line of JSON to
``DIR/steps.jsonl``; with ``--trace`` it also writes ``DIR/trace-MODEL.json``: SM, layer, operation and four times in ns
of a traced step.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from sgl_mega_plugin.bench.machine import find_machine
from sgl_mega_plugin.bench.records import Size
from sgl_mega_plugin.bench.workloads import WORKLOADS, forward
from sgl_mega_slots.target.target_step import trace
from sgl_mega_slots.target.target_step.buffers import StepBuffers
from sgl_mega_slots.target.target_step.driver import GpuKernel
from sgl_mega_slots.target.target_step.plan import StepPlan
from sgl_mega_slots.target.target_step.reference import decoder_step
from sgl_mega_slots.target.target_step.weights import Call, call_of

DEADLINE_S = 5.0


class Step:
    """A bound step and its graph."""

    def __init__(self, call: Call, device: torch.device, *, causal: bool, traced: bool = False) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.plan = StepPlan(
            call.shape,
            call.inputs.requests,
            call.inputs.tokens,
            properties.multi_processor_count,
            taps=call.taps,
            head=call.outputs.logits is not None,
            causal=causal,
            trace=traced,
        )
        self.buffers = StepBuffers(self.plan, device=device, deadline_s=DEADLINE_S)
        self.kernel = GpuKernel(self.plan, isa=f"sm_{properties.major}{properties.minor}")
        self.buffers.bind_model(call.weights, call.cache, self.kernel.encode)
        self.buffers.bind(call.inputs, call.outputs)
        self.launch()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.launch()

    def launch(self) -> None:
        self.kernel.launch(self.buffers.params, torch.cuda.current_stream().cuda_stream)

    def milliseconds(self, replays: int) -> list[float]:
        for _ in range(5):
            self.graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self.graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return times


def read_rate(device: torch.device) -> float:
    """Bytes a second that a reduction over 8 GB reads, the best of ten."""
    data = torch.ones(2**31, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.sum()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end))
    return data.nbytes / (best * 1e-3)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def outputs_of(call: Call) -> dict[str, torch.Tensor]:
    """What a step leaves, by name."""
    return {name: value for name, value in vars(call.outputs).items() if value is not None}


def errors_of(call: Call, *, causal: bool) -> dict[str, Any]:
    """How far the outputs are from the reference's, and where an argmax is another."""
    wanted = decoder_step(call.shape, call.weights, call.cache, call.inputs, causal=causal)
    out, found = call.outputs, dict[str, Any]()
    if out.hidden is not None:
        found["hidden_error"] = error(out.hidden, wanted.last_hidden)
    if out.tapped is not None:
        found["taps_error"] = error(out.tapped, torch.cat([wanted.residuals[tap] for tap in call.taps], -1))
    if out.logits is not None:
        found["logits_error"] = error(out.logits, wanted.logits)
        found["argmax_differs"] = int((out.logits.argmax(-1) != wanted.logits.argmax(-1)).sum())
        found["least_margin"] = float(wanted.logits.topk(2, -1).values.diff(dim=-1).abs().min())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(forward.MODELS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=forward.CONTEXT)
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--weights", choices=forward.WEIGHT_KINDS, default=forward.WEIGHTS, help="of layers")
    parser.add_argument("--kv", choices=forward.KV_KINDS, default=forward.KV, help="keys and values")
    parser.add_argument("--draft", action="store_true", help="the forward of the model's draft over a block")
    options = parser.parse_args()
    device = torch.device("cuda:0")
    forward.CONTEXT, forward.WEIGHTS, forward.KV = options.context, options.weights, options.kv
    workload, causal = WORKLOADS["draft_forward" if options.draft else "target_forward"], not options.draft
    size = Size(seam=workload.seam, variant=options.model, batch=options.batch, vocab=forward.VOCAB, dtype="bfloat16")
    arguments = workload.sets(size, "cuda", 1)[0]
    call = call_of(arguments)
    cost = workload.cost(arguments)
    outputs = outputs_of(call)
    for out in outputs.values():
        out.fill_(float("nan"))
    step = Step(call, device, causal=causal)
    first = {name: out.clone() for name, out in outputs.items()}
    errors = errors_of(call, causal=causal)
    times = step.milliseconds(options.replays)
    rate = read_rate(device)
    needed = cost.bytes_read / rate * 1e3
    record: dict[str, Any] = {
        "model": options.model,
        "draft": options.draft,
        "batch": options.batch,
        "tokens": call.inputs.tokens,
        "context": options.context,
        "weights": options.weights,
        "kv": options.kv,
        "ms": statistics.median(times),
        "quartiles_ms": statistics.quantiles(times, n=4),
        "bytes_read": cost.bytes_read,
        "read_rate": rate,
        "needed_ms": needed,
        "ratio": statistics.median(times) / needed,
        "replays": options.replays,
        "replays_identical": all(torch.equal(first[name], out) for name, out in outputs.items()),
        **errors,
        "machine": find_machine("cuda:0").model_dump(mode="json"),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "steps.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    told = {name: value for name, value in record.items() if name != "machine"}
    print(json.dumps(told))
    if options.trace:
        traced = Step(call, device, causal=causal, traced=True)
        traced.milliseconds(5)
        spans = trace.spans(traced.plan, traced.buffers.marks.tolist())
        lines = [
            [
                span.sm,
                span.layer,
                span.op.name,
                *map(round, (span.began, span.input_there, span.multiplied, span.ended)),
            ]
            for span in spans
        ]
        (options.out / f"trace-{options.model}.json").write_text(json.dumps(lines))
        for mean in trace.means(spans):
            times_ns = f"waits {mean.waited:.0f} ns, products {mean.multiplied:.0f}, rest {mean.finished:.0f}"
            print(f"{mean.op.name}: {times_ns}")


if __name__ == "__main__":
    main()
