"""The built-in slots, one folder each under its stage.

Importing this package imports neither torch nor Triton: a spec is metadata, its kernel is imported by a plan.
The entry point ``builtin`` of ``sgl_mega_plugin.slots`` reads ``SLOTS``.
"""

from sgl_mega_slots.commit.context_kv.spec import CONTEXT_KV
from sgl_mega_slots.draft.markov.spec import MARKOV
from sgl_mega_slots.glue.step_inputs.spec import STEP_INPUTS
from sgl_mega_slots.verify_accept.accept_tail.spec import ACCEPT_TAIL
from sgl_mega_slots.verify_accept.blockwise_rejection.spec import BLOCKWISE_REJECTION

SLOTS = (MARKOV, ACCEPT_TAIL, BLOCKWISE_REJECTION, STEP_INPUTS, CONTEXT_KV)

__all__ = ["SLOTS"]
