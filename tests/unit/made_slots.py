"""Slots, registries and installed distributions made up for tests."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from sgl_mega_plugin.contract import Backend, Host, Provided, Slot, Stage
from sgl_mega_plugin.contract.seams import SEAMS
from sgl_mega_plugin.registry import GROUP, Registry
from sgl_mega_plugin.switch import ENGINE_SLOTS

_SEAM_OF = {seam.stage: seam.name for seam in reversed(SEAMS.values())}  # the first seam of a stage
ENGINE = Host(runtime="sglang", isa="sm_90", backend=Backend.KERNEL, dtype="bfloat16", engine_version="0.5.23")
CPU = Host(runtime="embedded", isa="cpu", backend=Backend.REFERENCE, dtype="float32")


def kernel_slot(name: str, stage: Stage = Stage.VERIFY_ACCEPT, **fields: Any) -> Slot:
    """A slot with a kernel; its paths lead nowhere unless given."""
    paths = {"implementation": "nowhere:Kernel", "reference": "nowhere:reference", "cases": "nowhere:cases"}
    return Slot(name=name, stage=stage, summary=f"{name}, made up", seam=_SEAM_OF[stage], **(paths | fields))


def provided(slot: Slot, distribution: str = "sgl-mega-plugin", version: str = "1.0") -> Provided:
    return Provided(slot=slot, distribution=distribution, version=version)


def registry_of(*slots: Slot, engine: bool = True) -> Registry:
    """A registry of made-up slots, with the engine's switches unless told otherwise."""
    return Registry.of(provided(slot) for slot in (*slots, *(ENGINE_SLOTS if engine else ())))


def install(folder: Path, name: str, module: str, source: str, *, value: str = "SLOTS", entry: str = "made") -> None:
    """Lay out an installed distribution with one module and one entry point in our group."""
    info = folder / f"{name.replace('-', '_')}-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entry} = {module}:{value}\n")
    (folder / f"{module}.py").write_text(source)
    importlib.invalidate_caches()
