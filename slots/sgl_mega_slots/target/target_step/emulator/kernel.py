"""Compiles the kernel's source with the emulator's primitives and runs it on tensors of a CPU.

What ``driver`` is for a GPU. Needs a C++ compiler; a plan is compiled once and kept for the process.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from sgl_mega_slots.target.target_step import source
from sgl_mega_slots.target.target_step.buffers import MAP_BYTES, StepBuffers, Tile
from sgl_mega_slots.target.target_step.plan import StepPlan
from sgl_mega_slots.target.target_step.shape import SLAB

#: SMs of the GPU that is emulated: each is 320 threads.
SMS = 4
HERE = Path(__file__).parent
CSRC = HERE.parent / "csrc"
_FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas")


class EmulatorError(RuntimeError):
    """There is no C++ compiler, the source did not compile, or a run came to a stand."""


class EmulatedKernel:
    """A plan's kernel on the CPU.

    Args:
        changed: other texts for some of the kernel's files, by name; for tests.
    """

    def __init__(self, plan: StepPlan, *, changed: Mapping[str, str] | None = None) -> None:
        self._shared_bytes, self._name = plan.dynamic_shared_bytes, plan.name
        made = {"plan.cuh": source.plan_header(plan), **(changed or {})}
        self._library = ctypes.CDLL(str(_library(tuple(sorted(made.items())))))
        self._library.run_step.restype = ctypes.c_char_p
        self._library.run_step.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64]

    def run(self, buffers: StepBuffers, *, seed: int) -> str:
        """One step over the bound inputs, its threads interleaved by ``seed``: what went wrong, else an empty text."""
        address = ctypes.addressof(buffers.params)
        return str(self._library.run_step(address, seed, self._shared_bytes).decode())

    def widen(self, values: Tensor) -> Tensor:
        """What the kernel makes of fp8 values ``[4 n]`` (e4m3): bf16."""
        found = torch.empty(values.shape, dtype=torch.bfloat16)
        self._library.widen.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        self._library.widen(values.data_ptr(), found.data_ptr(), values.numel() // 4)
        return found

    def narrow(self, values: Tensor) -> Tensor:
        """What the kernel makes of fp32 values ``[2 n]``: fp8 (e4m3)."""
        found = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
        self._library.narrow.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        self._library.narrow(values.data_ptr(), found.data_ptr(), values.numel() // 2)
        return found

    def launch(self, address: int) -> None:
        """One step with the parameters at an address, as a GPU's launch.

        Raises:
            EmulatorError: a block can't go on.
        """
        if error := self._library.run_step(address, 0, self._shared_bytes).decode():
            raise EmulatorError(f"{self._name}: {error}")


def encode(tile: Tile) -> bytes:
    """A tile's map as the emulator reads it."""
    rows, columns = tile.matrix.shape
    stride = tile.matrix.stride(0) * 2
    data = struct.pack("<qqqqii", tile.matrix.data_ptr(), rows, columns // SLAB, stride, tile.box_rows, tile.box_slabs)
    return data.ljust(MAP_BYTES, b"\0")


def compiler() -> list[str]:
    """The system's C++ compiler, or that of the package `ziglang`. Raises :class:`EmulatorError` without either."""
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    if find_spec("ziglang") is None:
        raise EmulatorError("target_step on a CPU needs a C++ compiler: install g++ or 'pip install ziglang'")
    return [sys.executable, "-m", "ziglang", "c++"]


@cache
def _folder() -> Path:
    made = tempfile.mkdtemp(prefix="target_step-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@cache
def _library(made: tuple[tuple[str, str], ...]) -> Path:
    """The shared library of the kernel's files with these texts in place of their own, or beside them."""
    build = _folder() / hashlib.sha256(repr(made).encode()).hexdigest()[:16]
    shutil.copytree(CSRC, build)
    for name, text in made:
        (build / name).write_text(text)
    library = build / "step.so"
    command = [*compiler(), *_FLAGS, f"-I{build}", f"-I{HERE}", "-o", str(library), str(HERE / "run_step.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"target_step did not compile for the CPU: {done.stderr}")
    return library


def buffers(plan: StepPlan) -> StepBuffers:
    """Scratch of a plan on the CPU."""
    return StepBuffers(plan, device=torch.device("cpu"), deadline_s=1.0)
