"""The built-in slots as a registry, and the tests that need Triton's interpreter kept apart.

TRITON_INTERPRET acts when Triton is imported and then on the whole process, so ``interpreted/`` is collected only
where it is set; ``test_interpreter.py`` runs it in processes of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

from sgl_mega_plugin.contract import Provided
from sgl_mega_plugin.registry import Registry
from sgl_mega_slots import SLOTS

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]


@pytest.fixture(scope="session")
def builtin_slots() -> Registry:
    """The built-in slots, whether or not the distribution is installed."""
    return Registry.of(Provided(slot=slot, distribution="sgl-mega-plugin", version="0") for slot in SLOTS)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
