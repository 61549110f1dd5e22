"""What a launch is sized by on a device. Read when a slot is built, never in a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sgl_mega_plugin.contract import Backend, SlotSetup


@dataclass(frozen=True)
class Processors:
    """Multiprocessors, and the shared memory that a program may have, in bytes."""

    count: int
    shared_bytes: int

    @classmethod
    def of(cls, setup: SlotSetup) -> Processors:
        """Of the setup's GPU. Two for the interpreter, so that a program there takes several tiles."""
        if setup.backend is Backend.INTERPRETER:
            return cls(count=2, shared_bytes=99 * 1024)
        device = torch.device(setup.device)
        index = torch.cuda.current_device() if device.index is None else device.index
        found: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(index)
        return cls(count=found["multiprocessor_count"], shared_bytes=found["max_shared_mem"])
