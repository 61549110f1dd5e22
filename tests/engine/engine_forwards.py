"""A worker's process of a server that names a slot in the place of a model's forward, and its forwards on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_decoders import Served, one_rank
from engine_server import resolve
from sglang.srt.layers.rotary_embedding import base as rotary
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
from torch import Tensor

from sgl_mega_plugin.contract import Provided, SlotSetup
from sgl_mega_plugin.engine import specs
from sgl_mega_plugin.registry import load_reference
from sgl_mega_plugin.switch import SLOTS_VARIABLE

#: Root mean square of an error in a row, of the row's own. SGLang rounds about twelve times a layer to bf16 and the
#: slot six times, 2**-9 each: 2**-9 * sqrt(18 * 3) is 1.4 %; this is the slot's own bound, twice that.
BOUND = 2.0**-5


def reference_in_place_of(provided: Provided) -> Any:
    """A slot's reference with the constructor of its implementation; it keeps the setup and the calls."""

    class Reference:
        def __init__(self, setup: SlotSetup) -> None:
            self.setup = setup
            self.function = load_reference(provided)
            self.calls: list[dict[str, Any]] = []

        def __call__(self, **arguments: Any) -> None:
            self.calls.append(arguments)
            self.function(**arguments)

    return Reference


@contextmanager
def serving(slot: str, target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker's process of a server that names one slot; what it asks a GPU for is made up."""
    monkeypatch.setattr(specs, "load_implementation", reference_in_place_of)
    monkeypatch.setattr(rotary, "_is_cpu", True)
    os.environ["SGLANG_ROPE_CACHE_FP32"] = "1"
    os.environ[SLOTS_VARIABLE] = f"none,{slot}"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    record = resolve(target, draft, max_running_requests=16)  # more than the slots serve at a time
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    yield
    reset_context()


def run_forward(forward: Any, on: Served, batch: Any) -> Any:
    """A forward in the scope that SGLang has around one."""
    with one_rank(), on.context(batch):
        return forward(batch.input_ids, batch.positions, batch)


def row_error(found: Tensor, wanted: Tensor) -> float:
    """The largest relative error of a row, by root mean squares."""
    found, wanted = found.flatten(1).double(), wanted.flatten(1).double()
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max())
