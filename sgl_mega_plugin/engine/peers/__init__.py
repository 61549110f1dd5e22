"""SGLang's own functions for the work of a seam, as the benchmark times them beside the slots.

Each peer gets a seam's arguments, brings them into SGLang's form before it is timed, and returns what it computed
under the seam's names where the two are comparable. Imports SGLang only inside functions; ``missing`` says why
a peer cannot run here. Where SGLang has a kernel and a chain of small ones behind a switch, both are peers.
"""

from sgl_mega_plugin.engine.peers import commit, draft, glue, head, verify_accept
from sgl_mega_plugin.engine.peers.peer import (
    Arguments,
    Call,
    Outputs,
    Peer,
    PeerUnavailableError,
    engine_missing,
)

__all__ = ["Arguments", "Call", "Outputs", "Peer", "PeerUnavailableError", "engine_missing", "engine_peers"]

_PEERS: dict[str, tuple[Peer, ...]] = {**draft.PEERS, **verify_accept.PEERS, **glue.PEERS, **commit.PEERS, **head.PEERS}


def engine_peers(seam: str) -> tuple[Peer, ...]:
    """SGLang's ways to do a seam's work; none for a seam that it has nothing for."""
    return _PEERS.get(seam, ())
