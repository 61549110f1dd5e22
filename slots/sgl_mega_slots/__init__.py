"""The built-in slots, one folder each under its stage.

Importing this package imports neither torch nor Triton: a spec is metadata, its kernel is imported by a plan.
The entry point ``builtin`` of ``sgl_mega_plugin.slots`` reads ``SLOTS``.
"""

from sgl_mega_slots.commit.context_kv.spec import CONTEXT_KV
from sgl_mega_slots.commit.deferred_kv.spec import DEFERRED_KV
from sgl_mega_slots.commit.histories.spec import HISTORIES
from sgl_mega_slots.commit.kv_staging.spec import KV_STAGING
from sgl_mega_slots.draft.draft_lm_head.spec import DRAFT_LM_HEAD
from sgl_mega_slots.draft.draft_step.spec import DRAFT_STEP
from sgl_mega_slots.draft.markov.spec import MARKOV
from sgl_mega_slots.glue.attn_metadata.spec import ATTN_METADATA
from sgl_mega_slots.glue.params_once.spec import PARAMS_ONCE
from sgl_mega_slots.glue.relay.spec import RELAY
from sgl_mega_slots.glue.step_inputs.spec import STEP_INPUTS
from sgl_mega_slots.target.target_argmax_head.spec import TARGET_ARGMAX_HEAD
from sgl_mega_slots.target.target_step.spec import TARGET_STEP
from sgl_mega_slots.verify_accept.accept_tail.spec import ACCEPT_TAIL
from sgl_mega_slots.verify_accept.blockwise_rejection.spec import BLOCKWISE_REJECTION
from sgl_mega_slots.verify_accept.sampling_cutoffs.spec import SAMPLING_CUTOFFS

SLOTS = (
    MARKOV,
    DRAFT_STEP,
    DRAFT_LM_HEAD,
    ACCEPT_TAIL,
    SAMPLING_CUTOFFS,
    BLOCKWISE_REJECTION,
    STEP_INPUTS,
    ATTN_METADATA,
    RELAY,
    PARAMS_ONCE,
    CONTEXT_KV,
    KV_STAGING,
    DEFERRED_KV,
    HISTORIES,
    TARGET_STEP,
    TARGET_ARGMAX_HEAD,
)

__all__ = ["SLOTS"]
