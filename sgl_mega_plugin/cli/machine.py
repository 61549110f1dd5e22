"""What the sub-commands ask of this machine: torch, its GPU, and the host of a plan made from them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sgl_mega_plugin.cli.output import WrongUseError
from sgl_mega_plugin.contract import Backend, Host, Record
from sgl_mega_plugin.embedded import UNCALLED

if TYPE_CHECKING:
    import torch

#: HF model type of the embedded engine's demo target.
DEMO_MODEL_TYPE = "llama"


class Gpu(Record):
    """A GPU as slots see it."""

    name: str
    isa: str  # "sm_90"


def need_torch() -> None:
    """Import torch, set up for a machine that others use too; :class:`WrongUseError` where it does not import."""
    # Waiting threads sleep: where another process holds a core, spinning ones made a step twenty times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise WrongUseError(f"torch cannot be imported ({error}): pip install torch") from None


def find_gpu(device: str = "cuda") -> Gpu | None:
    """The GPU of a device name, or None where torch sees none. Imports torch."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu(name=torch.cuda.get_device_name(device), isa=f"sm_{major}{minor}")


def check_device(device: str) -> str:
    """The ISA of a device that a user named; anything that is not there is an error of use."""
    if device == "cpu":
        return "cpu"
    kind, _, index = device.partition(":")
    if kind != "cuda" or (":" in device and not index.isdecimal()):
        raise WrongUseError(f"--device {device!r} is no device: write 'cpu', 'cuda' or 'cuda:0'")
    need_torch()
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= int(index or 0):
        raise WrongUseError(
            f"--device {device!r}: torch {torch.__version__} sees {count} CUDA devices here; use --device cpu"
        )
    gpu = find_gpu(device)
    return gpu.isa if gpu is not None else "cpu"


def check_backend(device: str, backend: Backend) -> None:
    """A kernel runs on a GPU and Triton's interpreter on a CPU; anything else is an error of use."""
    wanted = {Backend.KERNEL: "cuda", Backend.INTERPRETER: "cpu"}.get(backend)
    if wanted is not None and device.partition(":")[0] != wanted:
        raise WrongUseError(
            f"backend {backend.value!r} runs on {wanted!r}, not on {device!r}: "
            "on a CPU use 'interpreter' or 'reference', on CUDA 'kernel' or 'reference'"
        )


def interpret() -> None:
    """Ask Triton for its interpreter; an error of use where Triton was imported before."""
    from sgl_mega_plugin.conformance.backend import prepare

    try:
        prepare("cpu", Backend.INTERPRETER)
    except RuntimeError as error:
        raise WrongUseError(str(error)) from None


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16"."""
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is no dtype of torch")
    return found


def embedded_host(*, isa: str, backend: Backend, dtype: str, max_batch: int | None = None) -> Host:
    """Where the embedded engine's plan runs."""
    return Host(
        runtime="embedded",
        isa=isa,
        backend=backend,
        dtype=dtype,
        model_type=DEMO_MODEL_TYPE,
        max_batch=max_batch,
        closed_seams=UNCALLED,
    )
