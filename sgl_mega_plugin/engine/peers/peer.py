"""What a peer is: another way to do the work of a seam, timed beside the slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sgl_mega_plugin.engine import version

Arguments = Mapping[str, Any]
#: Outputs under the seam's names; those of the first call are compared with the slot's.
Outputs = Mapping[str, Tensor]
#: A timed call; None says that it wrote the seam's own outputs.
Call = Callable[[], Outputs | None]


class PeerUnavailableError(RuntimeError):
    """Why a peer does not run on these inputs."""


def _nothing_missing() -> str | None:
    return None


@dataclass(frozen=True)
class Peer:
    """Another way to do the work of a seam.

    ``prepare(arguments)`` does what happens once, outside the timing, and returns the call; it raises
    :class:`PeerUnavailableError` for inputs that the peer does not take.
    """

    name: str
    summary: str
    prepare: Callable[[Arguments], Call]
    missing: Callable[[], str | None] = _nothing_missing


def engine_missing() -> str | None:
    """Why SGLang's functions cannot be called here, or None."""
    release = version.engine_version()
    if release is None:
        return "SGLang is not installed"
    return "; ".join(version.release_reasons(release)) or None


def engine_peer(name: str, summary: str, prepare: Callable[[Arguments], Call]) -> Peer:
    """A peer that calls SGLang's functions."""
    return Peer(name, summary, prepare, engine_missing)
