"""Launch of `target_step` on a GPU: loads a plan's binary, encodes its tensor maps and starts one block an SM.

Talks to the driver through ``cuda.bindings``, which SGLang depends on. Nothing here waits for the GPU, and a launch
reads no memory of the host but its parameters, so it can be captured.
"""

from __future__ import annotations

import ctypes
import enum
from importlib import import_module
from typing import Any

import torch

from sgl_mega_slots.target.target_step.buffers import StepBuffers, Tile
from sgl_mega_slots.target.target_step.build import KERNEL, build
from sgl_mega_slots.target.target_step.plan import CONSUMER_WARPS, StepPlan
from sgl_mega_slots.target.target_step.shape import SLAB
from sgl_mega_slots.target.target_step.source import Params
from sgl_mega_slots.target.target_step.weights import Cache, StepInputs, Weights

#: Threads of a block: the consumers, one warp that streams weights and one that brings inputs.
THREADS = 32 * (CONSUMER_WARPS + 2)


class Wait(enum.IntEnum):
    """What a block waits for, as the kernel numbers it."""

    WEIGHTS_FULL = 1
    WEIGHTS_EMPTY = 2
    INPUT_FULL = 3
    INPUT_EMPTY = 4
    SCALES = 5
    ARRIVALS = 6


_WORDS = {
    Wait.WEIGHTS_FULL: "a stage of weights to arrive",
    Wait.WEIGHTS_EMPTY: "a stage of weights to be used up",
    Wait.INPUT_FULL: "an input to arrive",
    Wait.INPUT_EMPTY: "an input to be used up",
    Wait.SCALES: "the scales of a norm",
    Wait.ARRIVALS: "other SMs' part of an input",
}


class LaunchError(RuntimeError):
    """A call of the driver failed; the message names it and its code."""


class TargetStep:
    """A plan on a GPU with the model's weights and cache; ``launch`` runs one step of the bound inputs.

    Attributes:
        buffers: the results, and where the step's inputs are bound.
        seconds: what building the binary took.
        cached: whether it was found on disk.

    Raises:
        BuildError: the kernel did not compile.
        LaunchError: the driver refused the binary or a tensor map.
    """

    def __init__(
        self, plan: StepPlan, weights: Weights, cache: Cache, *, device: torch.device, isa: str, deadline_s: float
    ) -> None:
        self._driver: Any = import_module("cuda.bindings.driver")
        binary = build(plan, isa)
        self.seconds, self.cached = binary.seconds, binary.cached
        with torch.cuda.device(device):
            torch.cuda.init()
            self.buffers = StepBuffers(plan, weights, cache, device=device, encode=self._encode, deadline_s=deadline_s)
            module = self._call("cuModuleLoadData", binary.code)
            self._function = self._call("cuModuleGetFunction", module, KERNEL.encode())
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", self._function, attribute, plan.dynamic_shared_bytes)
        self._config = self._configuration(plan)

    def bind(self, inputs: StepInputs) -> None:
        """See :meth:`StepBuffers.bind`; the tensors must live as long as launches, or graphs of them, do."""
        self.buffers.bind(inputs)

    def launch(self, stream: int) -> None:
        """One step on a stream, given by its handle. Steps of one object must not overlap."""
        self._config.hStream = self._driver.CUstream(stream)
        params = Params.from_buffer_copy(self.buffers.params)
        address = ctypes.c_void_p(ctypes.addressof(params))
        self._call("cuLaunchKernelEx", self._config, self._function, ctypes.addressof(address), 0)

    def failure(self) -> str | None:
        """Which wait did not end, in words; None while all did. Reads host memory, also after a crash of the GPU."""
        return describe_failure(self.buffers.failure.tolist())

    # --- parts

    def _encode(self, tile: Tile) -> bytes:
        driver, matrix = self._driver, tile.matrix
        rows, columns = matrix.shape
        numbers = [driver.cuuint64_t(value) for value in (SLAB, rows, columns // SLAB)]
        strides = [driver.cuuint64_t(value) for value in (matrix.stride(0) * 2, SLAB * 2)]
        box = [driver.cuuint32_t(value) for value in (SLAB, tile.box_rows, tile.box_slabs)]
        found = self._call(
            "cuTensorMapEncodeTiled",
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            matrix.data_ptr(),
            numbers,
            strides,
            box,
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
            raise LaunchError(f"target_step: {name} failed: {error!r}")
        return found[0] if found else None


def describe_failure(record: list[int]) -> str | None:
    """The kernel's record of a wait that did not end, in words: failed, wait, SM, layer, index, value seen."""
    failed, wait, sm, layer, index, seen = record
    if not failed:
        return None
    what = _WORDS[Wait(wait)] if wait in set(Wait) else f"something unknown ({wait})"
    return (
        f"target_step: SM {sm} waited too long for {what}, layer {layer}, number {index}, last seen {seen}. "
        "The GPU is hung or another process holds its SMs"
    )
