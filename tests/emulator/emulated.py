"""The step kernel on a CPU: compiles its source with the emulator's primitives and runs it on torch tensors."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from sgl_mega_slots.target.target_step import source
from sgl_mega_slots.target.target_step.buffers import MAP_BYTES, StepBuffers, Tile
from sgl_mega_slots.target.target_step.plan import StepPlan
from sgl_mega_slots.target.target_step.shape import SLAB

HERE = Path(__file__).parent
CSRC = Path(source.__file__).parent / "csrc"


def compiler() -> list[str]:
    """The C++ compiler: the system's, or the one of the `ziglang` package."""
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    return [sys.executable, "-m", "ziglang", "c++"]


def encode(tile: Tile) -> bytes:
    """A tile's map as the emulator reads it."""
    rows, columns = tile.matrix.shape
    stride = tile.matrix.stride(0) * 2
    data = struct.pack("<qqqqii", tile.matrix.data_ptr(), rows, columns // SLAB, stride, tile.box_rows, tile.box_slabs)
    return data.ljust(MAP_BYTES, b"\0")


class EmulatedStep:
    """A compiled plan. ``run`` returns what went wrong, an empty string where nothing did.

    ``changed`` has other texts for some of the kernel's files, by name.
    """

    def __init__(self, plan: StepPlan, folder: Path, changed: Mapping[str, str] | None = None) -> None:
        self._plan = plan
        made = {"plan.cuh": source.plan_header(plan), **(changed or {})}
        key = hashlib.sha256(repr(sorted(made.items())).encode()).hexdigest()[:16]
        build = folder / key
        library = build / "step.so"
        if not library.exists():
            shutil.copytree(CSRC, build, dirs_exist_ok=True)
            for name, text in made.items():
                (build / name).write_text(text)
            flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
            includes = [f"-I{build}", f"-I{HERE}"]
            subprocess.run([*compiler(), *flags, *includes, "-o", library, HERE / "run_step.cpp"], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.run_step.restype = ctypes.c_char_p
        self._library.run_step.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64]

    def run(self, buffers: StepBuffers, *, seed: int) -> str:
        """One step over the bound inputs, its threads interleaved by ``seed``."""
        size = self._plan.dynamic_shared_bytes
        return str(self._library.run_step(ctypes.addressof(buffers.params), seed, size).decode())


def buffers(plan: StepPlan, weights: object, cache: object) -> StepBuffers:
    """Buffers of a plan on the CPU."""
    return StepBuffers(plan, weights, cache, device=torch.device("cpu"), encode=encode, deadline_s=1.0)  # type: ignore[arg-type]
