"""Launch of `target_step`, and what `draft_step` shares with it: a plan for each number of requests, its kernel built
and the model bound once.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.common.checks import require_backend
from sgl_mega_slots.target.target_step.buffers import StepBuffers
from sgl_mega_slots.target.target_step.driver import GpuKernel, describe_failure
from sgl_mega_slots.target.target_step.emulator import kernel as emulator
from sgl_mega_slots.target.target_step.plan import SHARED_BYTES, SMALL_SHARED_BYTES, StepPlan
from sgl_mega_slots.target.target_step.source import Params
from sgl_mega_slots.target.target_step.weights import Call, call_of

logger = logging.getLogger(__name__)

#: Longest wait of an SM for another: it ends the process, so it is far above any step.
DEADLINE_S = 10.0
#: How often the host looks whether a kernel stopped itself. The process ends soon after, when it meets CUDA's error.
LOOK_S = 0.1


class Device(NamedTuple):
    """What a plan has to know of a GPU."""

    isa: str
    sms: int
    shared_bytes: int


def device_of(setup: SlotSetup, name: str) -> Device:
    """The setup's GPU, or the one that is emulated on a CPU, for the slot of that name.

    Raises:
        ValueError: the backend does not go with the device.
    """
    require_backend(setup, name)
    if setup.backend is Backend.INTERPRETER:
        return Device("cpu", emulator.SMS, SHARED_BYTES)
    found = torch.cuda.get_device_properties(setup.device)
    isa = f"sm_{found.major}{found.minor}"
    return Device(isa, found.multi_processor_count, SMALL_SHARED_BYTES if isa == "sm_120" else SHARED_BYTES)


class _Bound:
    """A plan with its kernel, its scratch and a model."""

    def __init__(self, plan: StepPlan, device: Device, call: Call, on: torch.device) -> None:
        self.buffers = StepBuffers(plan, device=on, deadline_s=DEADLINE_S)
        if on.type == "cpu":
            self._emulated = emulator.EmulatedKernel(plan)
            self.buffers.bind_model(call.weights, call.cache, emulator.encode)
            return
        with torch.cuda.device(on):
            self._kernel = GpuKernel(plan, isa=device.isa)
            self.buffers.bind_model(call.weights, call.cache, self._kernel.encode)

    def step(self, on: torch.device) -> None:
        if on.type == "cpu":
            params = self.buffers.params
            _launch_on_cpu(partial(_emulate, self._emulated, type(params).from_buffer_copy(params)))
        else:
            self._kernel.launch(self.buffers.params, torch.cuda.current_stream(on).cuda_stream)


class OneLaunch:
    """Steps of a dense decoder as one launch each. The first with a model or a number of requests builds and binds;
    after it, steps of the same kind are capturable.

    Args:
        name: of the slot.
        tokens: rows that a request may have.
        causal: as in the plan.
    """

    def __init__(self, setup: SlotSetup, *, name: str, tokens: tuple[int, ...], causal: bool) -> None:
        self._device = device_of(setup, name)
        self._on = torch.device(setup.device)
        self._name, self._tokens, self._causal = name, tokens, causal
        self._most = setup.max_batch
        self._bound: dict[tuple[object, ...], _Bound] = {}  # for good: graphs that were captured hold the addresses
        if self._on.type == "cuda":
            threading.Thread(target=tell_failures, args=(weakref.ref(self), LOOK_S), daemon=True).start()

    def run(self, call: Call) -> None:
        """One step.

        Raises:
            ValueError: the kernel does not cover the decoder or the rows.
            BuildError: the kernel did not compile.
            LaunchError: the driver refused the kernel, a tensor map or the launch.
        """
        bound = self._bind(call)
        bound.buffers.bind(call.inputs, call.outputs)
        bound.step(self._on)

    def failures(self) -> list[str]:
        """Waits that did not end, in words. Reads host memory alone, so also after the kernel stopped the GPU."""
        records = [bound.buffers.failure.tolist() for bound in list(self._bound.values())]
        told = [describe_failure(record, self._name) for record in records]
        return [text for text in told if text is not None]

    def _bind(self, call: Call) -> _Bound:
        inputs = call.inputs
        if inputs.requests > self._most or inputs.tokens not in self._tokens:
            raise ValueError(
                f"{self._name}: {inputs.requests} requests of {inputs.tokens} rows; it was built for at most "
                f"{self._most} of {' or '.join(map(str, self._tokens))}"
            )
        head = call.outputs.logits is not None
        memory = (*call.weights.every(), *call.cache.keys, *call.cache.values)
        key = (call.shape, inputs.requests, inputs.tokens, call.taps, head, *(tensor.data_ptr() for tensor in memory))
        if key not in self._bound:
            plan = StepPlan(
                call.shape,
                inputs.requests,
                inputs.tokens,
                self._device.sms,
                taps=call.taps,
                head=head,
                causal=self._causal,
                shared_bytes=self._device.shared_bytes,
            )
            self._bound[key] = _Bound(plan, self._device, call, self._on)
        return self._bound[key]


class TargetStep(OneLaunch):
    """`target_forward` as one launch. The first call with a model or a number of requests builds and binds; after
    it, calls of the same kind are capturable.
    """

    def __init__(self, setup: SlotSetup) -> None:
        super().__init__(setup, name="target_step", tokens=(setup.gamma + 1,), causal=True)

    def __call__(
        self,
        *,
        input_ids: Tensor,
        positions: Tensor,
        cache_locs: Tensor,
        seq_lens: Tensor,
        req_pool_indices: Tensor,
        req_to_token: Tensor,
        embedding: Tensor,
        input_norms: Sequence[Tensor],
        qkv_weights: Sequence[Tensor],
        qkv_scales: Sequence[Tensor] | None,
        qkv_biases: Sequence[Tensor] | None,
        q_norms: Sequence[Tensor] | None,
        k_norms: Sequence[Tensor] | None,
        output_weights: Sequence[Tensor],
        output_scales: Sequence[Tensor] | None,
        mlp_norms: Sequence[Tensor],
        gate_up_weights: Sequence[Tensor],
        gate_up_scales: Sequence[Tensor] | None,
        down_weights: Sequence[Tensor],
        down_scales: Sequence[Tensor] | None,
        final_norm: Tensor,
        lm_head_weight: Tensor,
        cos_sin: Tensor,
        eps: float,
        taps: Sequence[int],
        out_keys: Sequence[Tensor],
        out_values: Sequence[Tensor],
        out_tapped: Tensor | None,
        out_hidden: Tensor | None,
        out_logits: Tensor | None,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.TargetForward`.

        Raises:
            ValueError: an argument is not the seam's.
            Exception: as :meth:`OneLaunch.run`.
        """
        self.run(call_of(dict(locals())))


def tell_failures(slot: weakref.ref[OneLaunch], look_s: float) -> None:
    """Log the waits that did not end, once there are any; returns then, or when the slot is gone. Runs in a thread."""
    while (alive := slot()) is not None:
        if told := alive.failures():
            for text in told:
                logger.error("sgl-mega-plugin: %s", text)
            return
        del alive
        time.sleep(look_s)


# --- a launch on a CPU as an operator, so that a recorder of operators sees it

_launches: list[Callable[[], None]] = []


def _launch_on_cpu(launch: Callable[[], None]) -> None:
    """Run a launch under a number, by which it can be run again with the parameters that it has now."""
    _launches.append(launch)
    torch.ops.sgl_mega.on_cpu(len(_launches) - 1)


def _emulate(kernel: emulator.EmulatedKernel, params: Params) -> None:
    kernel.launch(ctypes.addressof(params))


@torch.library.custom_op("sgl_mega::on_cpu", mutates_args=())
def _on_cpu(number: int) -> None:
    _launches[number]()
