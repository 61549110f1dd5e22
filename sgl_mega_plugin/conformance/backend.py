"""Which backend a device gets, and how the interpreter is asked for. Imports no torch."""

from __future__ import annotations

import os
import sys

from sgl_mega_plugin.contract import Backend

INTERPRET_VARIABLE = "TRITON_INTERPRET"


def prepare(device: str, backend: Backend | None = None) -> Backend:
    """The backend for a device: its kernel on CUDA, the interpreter on a CPU, unless one is named.

    Asks Triton for its interpreter where that backend is meant, which only works before Triton is
    imported.

    Raises:
        RuntimeError: Triton was imported already, in the other mode.
    """
    chosen = backend or (Backend.KERNEL if device.startswith("cuda") else Backend.INTERPRETER)
    if chosen is Backend.INTERPRETER and os.environ.get(INTERPRET_VARIABLE) != "1":
        if "triton" in sys.modules:
            raise RuntimeError(
                f"backend 'interpreter' needs {INTERPRET_VARIABLE}=1 before Triton is imported, and it is imported "
                f"already: start Python with {INTERPRET_VARIABLE}=1"
            )
        os.environ[INTERPRET_VARIABLE] = "1"
    return chosen
