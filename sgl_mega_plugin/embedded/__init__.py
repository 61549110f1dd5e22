"""A small DSpark engine on the slots' seams: a real model on a CPU or one GPU, without SGLang.

``Engine(load_demo()).generate([Request(text="...")])`` is the whole of it; ``compare_runs`` runs the
same requests plain, speculative, and with slots. Importing this package loads nothing; its names
import torch when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_mega_plugin.embedded.compare import Report, compare_runs
    from sgl_mega_plugin.embedded.engine import Engine
    from sgl_mega_plugin.embedded.models import DemoModels, load_demo
    from sgl_mega_plugin.embedded.request import Completion, Request, RequestError

_HOMES = {
    "Completion": "request",
    "DemoModels": "models",
    "Engine": "engine",
    "Report": "compare",
    "Request": "request",
    "RequestError": "request",
    "compare_runs": "compare",
    "load_demo": "models",
}

#: Seams at which this engine calls no slot, with the reason. For ``Host.closed_seams``.
UNCALLED = {
    "history_commit": "the embedded engine's models keep no history of token ids, so nothing calls this seam",
    "draft_forward": "the embedded engine runs its draft a layer at a time, in the dtype of its file",
    "target_forward": "the embedded engine runs its target a layer at a time, in the dtype of its weights' file",
}

__all__ = [
    "UNCALLED",
    "Completion",
    "DemoModels",
    "Engine",
    "Report",
    "Request",
    "RequestError",
    "compare_runs",
    "load_demo",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
