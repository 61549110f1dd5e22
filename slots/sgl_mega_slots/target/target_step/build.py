"""The kernel's binary for a plan: compiled by NVRTC, without a host compiler, and kept on disk.

`cuda.core` compiles, caches and keys by source, options and compiler version. Its cache lies where it puts it for the
user, or under ``SGL_MEGA_CACHE_DIR``.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sgl_mega_slots.target.target_step.plan import StepPlan
from sgl_mega_slots.target.target_step.source import translation_unit

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "SGL_MEGA_CACHE_DIR"
KERNEL = "target_step"

#: ISAs as SGLang names them, and what they are compiled for: bulk tensor copies need the exact chip only on sm_90.
ARCHITECTURES = {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_103": "sm_103a", "sm_120": "sm_120a"}


class BuildError(RuntimeError):
    """The kernel did not compile; the message is the compiler's."""


@dataclass(frozen=True)
class Binary:
    """A compiled plan."""

    code: bytes
    seconds: float
    cached: bool


def build(plan: StepPlan, isa: str) -> Binary:
    """Compile a plan's kernel, or find it in the cache.

    Args:
        isa: of the GPU, as ``sm_<major><minor>``.

    Raises:
        BuildError: with the compiler's message, the ISA and what to do.
    """
    if isa not in ARCHITECTURES:
        raise BuildError(f"{plan.name}: no binary for {isa}; there is one for {', '.join(ARCHITECTURES)}")
    core, utils = cuda_module("cuda.core"), cuda_module("cuda.core.utils")
    options = core.ProgramOptions(name=KERNEL, arch=ARCHITECTURES[isa], std="c++17")
    text = translation_unit(plan)
    started = time.monotonic()
    with utils.FileStreamProgramCache(_folder(), max_size_bytes=256 * 2**20) as cache:
        key = utils.make_program_cache_key(code=text, code_type="c++", options=options, target_type="cubin")
        if (found := cache.get(key)) is not None:
            return Binary(bytes(found), time.monotonic() - started, cached=True)
        logger.info("sgl-mega-plugin: compiling %s for %s, %d rows", plan.name, isa, plan.rows)
        try:
            code = bytes(core.Program(text, "c++", options).compile("cubin").code)
        except Exception as error:
            raise BuildError(
                f"{plan.name} did not compile for {isa}: {error}. Take it off the list of slots to start without it"
            ) from error
        cache[key] = code
    return Binary(code, time.monotonic() - started, cached=False)


def cuda_module(name: str) -> Any:
    """A module of CUDA's Python packages. Raises :class:`BuildError` where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise BuildError(
            f"the kernel needs the module {name}, which 'pip install cuda-core cuda-bindings' brings: {error}. "
            "Take target_step and draft_step off the list of slots to start without it"
        ) from error


def _folder() -> Path | None:
    return Path(os.environ[CACHE_VARIABLE]) / KERNEL if os.environ.get(CACHE_VARIABLE) else None
