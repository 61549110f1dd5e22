"""What a server's decode step is made of: launches and copies from a torch profiler trace, host time from py-spy.

Used by ``compare_servers.py --profile``. Both look at a server that decodes one long request.
"""

from __future__ import annotations

import collections
import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

#: A CUDA runtime or driver call's name begins so -> what it is counted as.
_CALLS = {
    "cudaGraphLaunch": "graph launches",
    "cuGraphLaunch": "graph launches",
    "cudaLaunchKernel": "kernel launches",
    "cuLaunchKernel": "kernel launches",
    "cudaMemcpy": "copies and fills",
    "cuMemcpy": "copies and fills",
    "cudaMemset": "copies and fills",
    "cuMemset": "copies and fills",
    "cudaStreamWaitEvent": "stream waits",
    "cudaEventRecord": "event records",
    "cudaEventSynchronize": "host waits",
    "cudaStreamSynchronize": "host waits",
    "cudaDeviceSynchronize": "host waits",
}
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LOOP, _FORWARD = "event_loop", "forward_batch_generation"
_KERNELS, _NAME = 30, 100  # kernels that are named, the longest first, and how many characters of a name


def of_trace(path: Path, steps: int) -> dict[str, Any]:
    """Calls a step, and GPU time a step in microseconds, of a trace of ``steps`` decode steps."""
    events = _events(path)
    gpu = [event for event in events if event.get("cat") in _GPU]
    calls: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            kinds = (kind for start, kind in _CALLS.items() if event["name"].startswith(start))
            calls[next(kinds, "other calls")] += 1
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in gpu)
    busy, reached = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    wall = max(end for _, end in spans) - spans[0][0]
    by_kernel: collections.Counter[str] = collections.Counter()
    for event in gpu:
        by_kernel[event["name"][:_NAME]] += event["dur"]
    return {
        "steps": steps,
        "calls_a_step": {kind: round(count / steps, 2) for kind, count in sorted(calls.items())},
        "gpu_kernels_a_step": round(len(spans) / steps, 1),
        "gpu_busy_us_a_step": round(busy / steps, 1),
        "gpu_wall_us_a_step": round(wall / steps, 1),
        "gpu_us_a_step_by_kernel": {name: round(us / steps, 1) for name, us in by_kernel.most_common(_KERNELS)},
    }


def timeline(path: Path, microseconds: float) -> list[tuple[str, float, float]]:
    """Spans (what, start, length) in microseconds from the middle of a trace: ``gpu`` and each kind of host call."""
    events = _events(path)
    gpu = [event for event in events if event.get("cat") in _GPU]
    first = (min(event["ts"] for event in gpu) + max(event["ts"] for event in gpu)) / 2
    spans = []
    for event in events:
        start = event["ts"] - first
        if 0 <= start < microseconds:
            if event.get("cat") in _GPU:
                spans.append(("gpu", round(start, 1), round(event["dur"], 1)))
            elif event.get("cat") in ("cuda_runtime", "cuda_driver"):
                kinds = (kind for begins, kind in _CALLS.items() if event["name"].startswith(begins))
                spans.append((next(kinds, "other calls"), round(start, 1), round(event["dur"], 1)))
    return spans


def _events(path: Path) -> list[dict[str, Any]]:
    """What has a beginning and a length in a trace."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def of_host(py_spy: str, pid: int, seconds: int, raw: Path) -> dict[str, Any]:
    """Share of the scheduler's loop that lies inside ``forward_batch_generation``, sampled 500 times a second."""
    command = [py_spy, "record", "-p", str(pid), "-d", str(seconds), "-r", "500", "-f", "raw", "-o", str(raw)]
    subprocess.run([*command, "--nonblocking"], check=True, capture_output=True)
    loop = forward = 0
    inside: collections.Counter[str] = collections.Counter()
    for line in raw.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if not any(_LOOP in frame for frame in frames):
            continue
        loop += int(count)
        inside.update({frame.split(" ")[0]: int(count) for frame in frames})
        forward += int(count) if any(_FORWARD in frame for frame in frames) else 0
    top = {frame: round(count / max(loop, 1), 3) for frame, count in inside.most_common(40)}
    return {"samples": loop, "share_in_forward_batch_generation": round(forward / max(loop, 1), 4), "frames": top}
