"""A plan's kernel on a GPU: loads its binary, encodes its tensor maps and starts one block an SM.

Talks to the driver through ``cuda.bindings``, which SGLang depends on. A launch waits for nothing and reads no memory
of the host but its parameters, so it can be captured.
"""

from __future__ import annotations

import ctypes
import enum
from typing import Any

import torch

from sgl_mega_slots.target.target_step.buffers import Tile
from sgl_mega_slots.target.target_step.build import KERNEL, build, cuda_module
from sgl_mega_slots.target.target_step.plan import CONSUMER_WARPS, StepPlan
from sgl_mega_slots.target.target_step.shape import SLAB
from sgl_mega_slots.target.target_step.source import Params

#: Threads of a block: the consumers, and a warp each for weights and for the scales of norms.
THREADS = 32 * (CONSUMER_WARPS + 2)


class Wait(enum.IntEnum):
    """What a block waits for, as the kernel numbers it."""

    WEIGHTS_FULL = 1
    WEIGHTS_EMPTY = 2
    SCALES = 3
    ARRIVALS = 4


_WORDS = {
    Wait.WEIGHTS_FULL: "a stage of weights to arrive",
    Wait.WEIGHTS_EMPTY: "a stage of weights to be used up",
    Wait.SCALES: "the scales of a norm",
    Wait.ARRIVALS: "values of other SMs",
}


class LaunchError(RuntimeError):
    """A call of the driver failed; the message names it and its code."""


class GpuKernel:
    """A plan's kernel on the current device.

    Attributes:
        seconds: what building the binary took.
        cached: whether it was found on disk.

    Raises:
        BuildError: the kernel did not compile.
        LaunchError: the driver refused the binary.
    """

    def __init__(self, plan: StepPlan, *, isa: str) -> None:
        self._driver = cuda_module("cuda.bindings.driver")
        self._name = plan.name
        binary = build(plan, isa)
        self.seconds, self.cached = binary.seconds, binary.cached
        torch.cuda.init()
        module = self._call("cuModuleLoadData", binary.code)
        self._function = self._call("cuModuleGetFunction", module, KERNEL.encode())
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", self._function, attribute, plan.dynamic_shared_bytes)
        self._config = self._configuration(plan)

    def launch(self, params: Params, stream: int) -> None:
        """One step on a stream, given by its handle. Steps of the same scratch must not overlap."""
        self._config.hStream = self._driver.CUstream(stream)
        copied = type(params).from_buffer_copy(params)
        argument = ctypes.c_void_p(ctypes.addressof(copied))
        self._call("cuLaunchKernelEx", self._config, self._function, ctypes.addressof(argument), 0)

    def encode(self, tile: Tile) -> bytes:
        """The driver's tensor map of a tile: lines of 64 values, rows, and the line's place in the row."""
        driver, matrix = self._driver, tile.matrix
        rows, columns = matrix.shape
        found = self._call(
            "cuTensorMapEncodeTiled",
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            matrix.data_ptr(),
            [driver.cuuint64_t(size) for size in (SLAB, rows, columns // SLAB)],
            [driver.cuuint64_t(stride) for stride in (matrix.stride(0) * 2, SLAB * 2)],
            [driver.cuuint32_t(size) for size in (SLAB, tile.box_rows, tile.box_slabs)],
            [driver.cuuint32_t(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return b"".join(int(word).to_bytes(8, "little") for word in found.opaque)

    def _configuration(self, plan: StepPlan) -> Any:
        driver = self._driver
        cooperative = driver.CUlaunchAttribute()
        cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1  # all blocks resident, or the launch is refused
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = plan.sms, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
        config.sharedMemBytes = plan.dynamic_shared_bytes
        config.attrs, config.numAttrs = [cooperative], 1
        return config

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *found = getattr(self._driver, name)(*arguments)
        if int(error) != 0:
            raise LaunchError(f"{self._name}: {name} failed: {error!r}")
        return found[0] if found else None


def describe_failure(record: list[int], name: str) -> str | None:
    """The kernel's record of a wait that did not end, in words.

    Args:
        record: whether there is one, where (wait, layer and operation in 8, 16 and 8 bits), SM, value seen.
        name: of the slot.
    """
    failed, where, sm, seen = record
    wait, layer, op = where >> 24, where >> 8 & 0xFFFF, where & 0xFF
    if not failed:
        return None
    what = _WORDS[Wait(wait)] if wait in set(Wait) else f"something unknown ({wait})"
    return (
        f"{name}: SM {sm} waited too long for {what}, layer {layer}, operation {op}, last seen {seen}. "
        "The GPU is hung or another process holds its SMs"
    )
