"""What a result has to say of the machine it was measured on. Reads only; the GPU's settings stay as they are."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sgl_mega_plugin.bench.records import Clocks, Machine

UNKNOWN = "unknown"
#: nvidia-smi's names of what may move a result.
SMI_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "clocks_event_reasons.active",
)
_SECONDS = 20


def find_machine(device: str) -> Machine:
    """This machine and its GPU; what cannot be found out is "unknown". Imports torch, needs its CUDA."""
    import torch

    commit, dirty = find_commit(Path(__file__).parents[1])
    clocks = read_clocks(device, "before")
    return Machine(
        device=device,
        gpu=torch.cuda.get_device_name(device),
        driver=clocks.values.get("driver_version", UNKNOWN),
        cuda=torch.version.cuda or UNKNOWN,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=version_of("triton"),
        sglang=version_of("sglang"),
        platform=platform.platform(),
        commit=commit,
        dirty=dirty,
        clocks=(clocks,),
    )


def version_of(distribution: str) -> str:
    """An installed distribution's version, or "not installed"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def read_clocks(device: str, when: str) -> Clocks:
    """What nvidia-smi says of a device now; no values without nvidia-smi or in a form that is not known."""
    import torch

    # By its own name, because CUDA_VISIBLE_DEVICES renumbers devices for torch and not for nvidia-smi.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return Clocks(when=when)
    name = f"GPU-{uuid}"
    query = [f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    return Clocks(when=when, values=parse_smi(_output("nvidia-smi", "-i", name, *query) or ""))


def parse_smi(text: str) -> dict[str, str]:
    """The one line of nvidia-smi's answer as field and value; empty for any other answer."""
    lines = [line for line in text.splitlines() if line.strip()]
    values = [value.strip() for value in lines[0].split(",")] if len(lines) == 1 else []
    return dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else {}


def find_commit(package: Path) -> tuple[str, bool | None]:
    """The commit of the source tree that a package lies in, and whether it has changes; ("unknown", None) if none.

    A package that is installed below another project's repository has no commit: that one would name the wrong code.
    """
    top = _output("git", "-C", str(package), "rev-parse", "--show-toplevel")
    if not top or Path(top.strip()) != package.resolve().parent:
        return UNKNOWN, None
    commit = _output("git", "-C", str(package), "rev-parse", "HEAD")
    status = _output("git", "-C", str(package), "status", "--porcelain")
    if not commit or status is None:
        return UNKNOWN, None
    return commit.strip(), bool(status.strip())


def _output(*command: str) -> str | None:
    """What a command prints, or None where it is missing, fails or hangs."""
    words: Sequence[str] = command
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return None
