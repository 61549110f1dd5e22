"""What a seam is: a named call of a stage, with the parameters that an implementation must take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl_mega_plugin.contract.stage import Stage


@dataclass(frozen=True)
class Seam:
    """A named call of a stage: its parameters are what a slot's implementation must take."""

    name: str
    stage: Stage
    protocol: type[Any]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The keyword-only parameter names, in order."""
        return _keywords(self.protocol.__call__)

    def mismatches(self, call: Callable[..., Any]) -> list[str]:
        """How a callable's signature departs from this seam's; empty when it fits."""
        try:
            signature = inspect.signature(call)
        except (TypeError, ValueError):
            return [f"{call!r} has no signature"]
        wanted, found = self.parameters, _keywords(call)
        reasons = [f"lacks {name!r}" for name in wanted if name not in found]
        reasons += [f"has {name!r}, which the seam does not pass" for name in found if name not in wanted]
        for parameter in signature.parameters.values():
            if parameter.name == "self":
                continue
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                reasons.append(f"{parameter.name!r} is {parameter.kind.description}, not keyword-only")
        return reasons


def _keywords(call: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(call).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)
