"""Checks of a launch's arguments: shapes, dtypes, strides and device, never the data.

Every launch calls these before it touches a tensor, so that a wrong argument is an error that
names it rather than a read out of bounds. Nothing here waits for a device.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup

INDEX_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def require_backend(setup: SlotSetup, slot: str) -> None:
    """Refuse a backend that no kernel serves, or none on the setup's device.

    Raises:
        ValueError: the setup asks for the reference, or its device does not go with its backend.
    """
    if setup.backend is Backend.REFERENCE:
        raise ValueError(
            f"{slot}: backend 'reference' is served by the slot's reference function, not by its kernel; "
            f"build this class with {Backend.KERNEL.value!r} or {Backend.INTERPRETER.value!r}"
        )
    wants_cuda = setup.backend is Backend.KERNEL
    if (torch.device(setup.device).type == "cuda") is not wants_cuda:
        raise ValueError(
            f"{slot}: backend {setup.backend.value!r} on device {setup.device!r}; 'kernel' runs on a CUDA device, "
            "'interpreter' on 'cpu'"
        )


def require_triton(setup: SlotSetup, slot: str) -> None:
    """Refuse a backend that this process can't launch a Triton kernel for.

    Raises:
        ValueError: as :func:`require_backend`.
        RuntimeError: Triton was imported in the other mode (``TRITON_INTERPRET``).
    """
    require_backend(setup, slot)
    wants_cuda = setup.backend is Backend.KERNEL
    interpreting = bool(triton.knobs.runtime.interpret)
    if interpreting is wants_cuda:
        state = "set" if interpreting else "not set"
        wanted = "unset it" if wants_cuda else "set TRITON_INTERPRET=1"
        raise RuntimeError(
            f"{slot}: backend {setup.backend.value!r} while TRITON_INTERPRET is {state}; "
            f"{wanted} before Triton is imported"
        )


def require_tensor(
    name: str,
    value: Tensor,
    *,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: str,
) -> None:
    """Raise ValueError unless a tensor has this shape, one of these dtypes, this kind of device and
    a contiguous last axis. Leading axes may have any stride."""
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(value.shape)}; must be {shape}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {value.dtype}; must be one of {', '.join(map(str, dtypes))}")
    if value.device.type != device:
        raise ValueError(f"{name}: on {value.device}; the slot was built for a {device!r} device")
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name}: last axis has stride {value.stride(-1)}; must be 1, call .contiguous() on it")


def require_setup(name: str, found: int, allowed: int, what: str) -> None:
    """Raise ValueError where an argument's size differs from the size the slot was built with."""
    if found != allowed:
        raise ValueError(f"{name}: {what} {found}; the slot was built with {what} {allowed}")


def require_batch(name: str, batch: int, max_batch: int) -> None:
    """Raise ValueError for an empty batch or one larger than the slot was built for."""
    if not 1 <= batch <= max_batch:
        raise ValueError(f"{name}: B {batch}; must be 1 to {max_batch}, the max_batch the slot was built with")
