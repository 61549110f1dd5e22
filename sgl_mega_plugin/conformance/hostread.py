"""Finds reads by the host in a call: what a CUDA graph can't hold, seen on a CPU too.

On a CPU a read of a tensor's value succeeds and costs nothing, so nothing would tell an author that the same line
fails in a capture. Here a function mode sees the methods of tensors and a dispatch mode the operators below them. What
Triton does inside a launch is let through: its interpreter is the device here, and its autotuner runs once. Used by
the runner.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Methods that hand a value to Python. ``tolist`` and ``numpy`` reach no operator on a CPU.
_METHODS = frozenset(
    {
        "item", "tolist", "numpy", "cpu", "is_nonzero", "equal", "allclose", "__array__", "__bool__", "__complex__",
        "__contains__", "__float__", "__format__", "__index__", "__int__", "__repr__",
    }
)  # fmt: skip
#: Operators whose result, or the size of it, the host has to wait for.
_OPERATORS = frozenset(
    {
        "_local_scalar_dense", "_unique", "_unique2", "bincount", "equal", "is_nonzero", "item", "masked_select",
        "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim",
    }
)  # fmt: skip
_ASIDE = ("torch", __name__.rpartition(".")[0])


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """A list that fills with one line for each line of code that reads a tensor from the host."""
    found: dict[str, str] = {}
    lines: list[str] = []
    try:
        with _Methods(found), _Operators(found):
            yield lines
    finally:
        lines += [f"host read: {what} at {where}; a captured call can't" for where, what in found.items()]


class _Methods(TorchFunctionMode):
    def __init__(self, found: dict[str, str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        asked = [*args[1:], *(kwargs or {}).values()]
        if name in _METHODS or (name == "to" and "cpu" in [value for value in asked if isinstance(value, str)]):
            _note(self._found, f"Tensor.{name} of {_shape(args)}")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, found: dict[str, str]) -> None:
        TorchDispatchMode.__init__(self)
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if _waits(func.overloadpacket.__name__, args, kwargs):
            _note(self._found, f"aten.{func.overloadpacket.__name__} of {_shape(args)}")
        return func(*args, **kwargs)


def _waits(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator makes the host wait for the device."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_"):
        masks = any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masks and not (name != "index" and args[2].numel() == 1)  # one value is a masked fill
    if name in ("copy_", "_to_copy"):
        source = args[1] if name == "copy_" else args[0]
        to = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        return bool(source.device.type != "cpu" and to.type == "cpu")
    return name in _OPERATORS


def _note(found: dict[str, str], what: str) -> None:
    """Keep a read under the line that asked for it, unless Triton did."""
    frame: FrameType | None = sys._getframe(2)
    asker = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("triton."):
            return
        if asker is None and not _is_aside(module):
            asker = frame
        frame = frame.f_back
    where = "an unknown line" if asker is None else f"{asker.f_code.co_filename}:{asker.f_lineno}"
    found.setdefault(where, what)


def _is_aside(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in _ASIDE)


def _shape(args: Any) -> str:
    tensor = next((value for value in args if isinstance(value, Tensor)), None)
    return "a tensor" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
