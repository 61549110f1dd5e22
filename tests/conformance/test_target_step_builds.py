"""The kernel of `target_step` compiles for every ISA by NVRTC alone, fits the registers and is found again on disk."""

from __future__ import annotations

import ctypes
import io
import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sgl_mega_slots.target.target_step import build as building
from sgl_mega_slots.target.target_step import source
from sgl_mega_slots.target.target_step.cases import QWEN3_8B
from sgl_mega_slots.target.target_step.plan import SHARED_BYTES, SMALL_SHARED_BYTES, StepPlan
from sgl_mega_slots.target.target_step.shape import DenseShape, WeightKind

SMOLLM2 = DenseShape(
    layers=30, hidden=576, intermediate=1536, q_heads=9, kv_heads=3, head_dim=64, vocab=49152, eps=1e-5
)
#: SMs and shared memory of a block: H200, B200, B300, RTX PRO 6000.
GPUS = {
    "sm_90": (132, SHARED_BYTES),
    "sm_100": (148, SHARED_BYTES),
    "sm_103": (148, SHARED_BYTES),
    "sm_120": (188, SMALL_SHARED_BYTES),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(building.CACHE_VARIABLE, str(tmp_path))


@pytest.mark.parametrize("isa", list(GPUS))
@pytest.mark.parametrize("requests", [1, 2, 4])
def test_it_compiles(isa: str, requests: int) -> None:
    sms, shared = GPUS[isa]
    binary = building.build(StepPlan(QWEN3_8B, requests, 8, sms, taps=(2, 18), shared_bytes=shared), isa)
    assert binary.code[:4] == b"\x7fELF"
    assert not binary.cached


@pytest.mark.parametrize("isa", list(GPUS))
@pytest.mark.parametrize("kind", [WeightKind.FP8_CHANNEL, WeightKind.FP8_BLOCK])
def test_fp8_weights_and_keys_compile(isa: str, kind: WeightKind) -> None:
    sms, shared = GPUS[isa]
    plan = StepPlan(replace(QWEN3_8B, weights=kind, kv_fp8=True), 1, 8, sms, shared_bytes=shared)
    assert building.build(plan, isa).code[:4] == b"\x7fELF"


def test_a_model_of_many_layers_compiles() -> None:
    """The pointers of 80 layers are parameters of the launch: more than the 4 KB that old GPUs take."""
    shape = replace(QWEN3_8B, layers=80)
    assert ctypes.sizeof(source.params_of(shape.layers, 0)) > 4096
    assert building.build(StepPlan(shape, 1, 8, 132), "sm_90").code[:4] == b"\x7fELF"


def test_the_next_build_finds_it(tmp_path: Path) -> None:
    plan = StepPlan(SMOLLM2, 1, 8, 132)
    first, second = building.build(plan, "sm_90"), building.build(plan, "sm_90")
    assert (first.cached, second.cached) == (False, True)
    assert first.code == second.code
    assert not building.build(StepPlan(SMOLLM2, 2, 8, 132), "sm_90").cached


def test_a_failed_build_tells_the_compilers_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "translation_unit", lambda plan: 'extern "C" __global__ void f() { nonsense; }')
    with pytest.raises(building.BuildError, match="nonsense") as caught:
        building.build(StepPlan(SMOLLM2, 1, 8, 132), "sm_90")
    assert "sm_90" in str(caught.value)


@pytest.mark.parametrize("module", ["cuda.core", "cuda.core.utils"])
def test_a_package_that_is_missing_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(building.BuildError, match=f"needs the module {module}, which 'pip install cuda-core"):
        building.build(StepPlan(SMOLLM2, 1, 8, 132), "sm_90")


def test_another_isa_is_refused() -> None:
    with pytest.raises(building.BuildError, match="no binary for sm_80"):
        building.build(StepPlan(SMOLLM2, 1, 8, 132), "sm_80")


@pytest.mark.parametrize(
    ("requests", "kind"),
    [
        *((requests, WeightKind.BF16) for requests in (1, 2)),
        *((requests, kind) for kind in (WeightKind.FP8_CHANNEL, WeightKind.FP8_BLOCK) for requests in (1, 2, 4)),
    ],
)
def test_it_spills_little_and_stays_small(requests: int, kind: WeightKind) -> None:
    """Ten warps of a block leave 168 registers a thread.

    All of the code is read anew for each layer by every SM, so its size is time. Widening fp8 weights takes ten
    instructions for each two products of the tensor cores.
    """
    core: Any = import_module("cuda.core")
    options = core.ProgramOptions(arch="sm_90a", std="c++17", ptxas_options=["-v"])
    logs = io.StringIO()
    text = source.translation_unit(StepPlan(replace(QWEN3_8B, weights=kind), requests, 8, 132))
    binary = core.Program(text, "c++", options).compile("cubin", logs=logs)
    spilled = re.findall(r"(\d+) bytes spill stores", logs.getvalue())
    assert len(spilled) == 1
    assert int(spilled[0]) <= 64
    assert len(bytes(binary.code)) <= (180_000 if kind is WeightKind.BF16 else 220_000)
