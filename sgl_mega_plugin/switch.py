"""The master switch, and the engine's own switches as engine-backed slots.

The engine (SGLang 0.5.23) has sixteen optimizations of a DSpark step, each behind a variable, plus one
that acts only under simulated acceptance. Here each is a slot, so that one list shows everything. A
slot's name is its variable in lower case, without ``SGLANG_``, ``OPT_``, ``DSV41_`` and
``DSPARK_``; where a kernel of ours has that name, ``engine_`` stands in front.

The master switch turns on the sixteen where the environment leaves them unset. Variables are set in
the environment itself, so that child processes inherit them; ``BOOKKEEPING`` remembers which
ones this package set, so that no later reading takes them for the user's. Called by the engine
entry before the engine reads its variables, and by ``plan.py``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, MutableMapping

from pydantic import Field

from sgl_mega_plugin.contract.errors import SwitchError, quoted
from sgl_mega_plugin.contract.releases import ENGINE_VERSIONS
from sgl_mega_plugin.contract.selection import SLOTS_VARIABLE as SLOTS_VARIABLE
from sgl_mega_plugin.contract.slot import Record, Requirements, Slot
from sgl_mega_plugin.contract.stage import Stage

MASTER_SWITCH = "SGLANG_ENABLE_NV_MEGA_RUNTIME_OPTIMIZATION"
#: "NAME=value,..." of the engine variables that this package set in this process or a parent.
BOOKKEEPING = "SGLANG_NVIDIA_MEGAKERNEL_VARIABLES_SET"
PREFIX = "SGLANG_NVIDIA_MEGAKERNEL_"

#: How people write on and off; the engine's own switches take these words but "on" and "off".
ON_SPELLINGS = ("1", "true", "yes", "y", "on")
OFF_SPELLINGS = ("0", "false", "no", "n", "off")
_ENGINE_ON = frozenset(ON_SPELLINGS) - {"on"}
_ENGINE_OFF = frozenset(OFF_SPELLINGS) - {"off"}


def _switch(name: str, variable: str, stage: Stage, summary: str, *needs: str) -> Slot:
    return Slot(
        name=name,
        stage=stage,
        summary=summary,
        requires=Requirements(engine_versions=ENGINE_VERSIONS),
        needs=frozenset(needs),
        engine_switch=f"SGLANG_{variable}",
    )


_MASTERED = (
    _switch(
        "draft_prep_fork",
        "OPT_DSV41_DSPARK_DRAFT_PREP_FORK",
        Stage.DRAFT,
        "engine: draft attention metadata prepared on a side stream",
    ),
    _switch(
        "fused_accept_tail",
        "DSPARK_FUSED_ACCEPT_TAIL",
        Stage.VERIFY_ACCEPT,
        "engine: greedy accept and bookkeeping in one kernel of the verify graph",
    ),
    _switch(
        "engine_blockwise_rejection",
        "OPT_DSV41_BLOCKWISE_REJECTION",
        Stage.VERIFY_ACCEPT,
        "engine: sampled accept from per-block maxima and sums, no softmax written",
    ),
    _switch(
        "sampling_accept_graph",
        "OPT_DSV41_SAMPLING_ACCEPT_GRAPH",
        Stage.VERIFY_ACCEPT,
        "engine: accept and commits of an all-sampled step as one graph",
    ),
    _switch(
        "prepare_inputs_once",
        "OPT_DSV41_DSPARK_PREPARE_INPUTS_ONCE",
        Stage.GLUE,
        "engine: verify window, cache locations and anchor column in one launch",
    ),
    _switch(
        "mid_fold",
        "OPT_DSV41_DSPARK_MID_FOLD",
        Stage.GLUE,
        "engine: verify ids written by the tail of the draft graph",
    ),
    _switch(
        "post_fold",
        "OPT_DSV41_DSPARK_POST_FOLD",
        Stage.GLUE,
        "engine: lengths and bonus tokens relayed by the verify graph",
    ),
    _switch(
        "target_verify_metadata_glue",
        "OPT_DSV41_TARGET_VERIFY_METADATA_GLUE",
        Stage.GLUE,
        "engine: verify metadata prepared by the metadata glue graph",
    ),
    _switch(
        "target_metadata_early",
        "OPT_DSV41_TARGET_METADATA_EARLY",
        Stage.GLUE,
        "engine: verify metadata built beside the draft graph",
        "target_verify_metadata_glue",
    ),
    _switch(
        "skip_glued_replay_view",
        "OPT_SKIP_GLUED_REPLAY_VIEW",
        Stage.GLUE,
        "engine: no batch view for a replay once the glue graph is captured",
    ),
    _switch(
        "skip_prefilled_inputs",
        "OPT_DSV41_DSPARK_SKIP_PREFILLED_INPUTS",
        Stage.GLUE,
        "engine: a pre-planned verify replay does not copy its inputs again",
    ),
    _switch(
        "cuda_graph_fill_fast_path",
        "OPT_CUDA_GRAPH_FILL_FAST_PATH",
        Stage.GLUE,
        "engine: graph inputs filled by one copy, no reset of absent padding",
    ),
    _switch(
        "defer_context_kv",
        "DSPARK_DEFER_CONTEXT_KV",
        Stage.COMMIT,
        "engine: the draft's context KV is written by the next draft graph",
    ),
    _switch(
        "one_launch_commit_stage",
        "OPT_DSV41_DSPARK_ONE_LAUNCH_COMMIT_STAGE",
        Stage.COMMIT,
        "engine: the deferred commit staged in one launch",
        "defer_context_kv",
    ),
    _switch(
        "post_forward_cuda_graph",
        "OPT_DSV41_POST_FORWARD_CUDA_GRAPH",
        Stage.COMMIT,
        "engine: n-gram history commit and accept lengths in the verify graph",
    ),
    _switch(
        "mxfp4_deferred_finalized_shape",
        "OPT_MXFP4_DEFERRED_FINALIZED_SHAPE",
        Stage.TARGET,
        "engine: finalized output shape for MXFP4 experts above 32 rows",
    ),
)
_EXPLICIT = _switch(
    "sim_draw_ahead",
    "OPT_DSV41_DSPARK_SIM_DRAW_AHEAD",
    Stage.VERIFY_ACCEPT,
    "engine: simulated acceptance drawn before the draft; not part of the master switch",
)

#: The engine's switches as slots: sixteen that the master switch turns on, and one that it does not.
ENGINE_SLOTS: tuple[Slot, ...] = (*_MASTERED, _EXPLICIT)
#: The variables that the master switch turns on.
MASTER_VARIABLES: tuple[str, ...] = tuple(slot.engine_switch for slot in _MASTERED if slot.engine_switch)
#: Every variable that this package reads or sets.
KNOWN_VARIABLES: tuple[str, ...] = (
    SLOTS_VARIABLE,
    MASTER_SWITCH,
    BOOKKEEPING,
    *(slot.engine_switch for slot in ENGINE_SLOTS if slot.engine_switch),
)


class MasterRecord(Record):
    """What the master switch did to an environment."""

    on: bool
    left_to_engine: bool = False  # the engine has its own switch of this name
    set_now: tuple[str, ...] = ()
    set_before: dict[str, str] = Field(default_factory=dict)  # by this package, in a parent process or an earlier call
    kept: dict[str, str] = Field(default_factory=dict)  # set by the user


class UnknownVariable(Record):
    """A variable that looks like ours and that nothing reads."""

    name: str
    meant: str | None  # the closest of ours, if any is close


def master_switch(environ: Mapping[str, str]) -> bool:
    """Whether the master switch is on. Unset and blank are off.

    Case and white space around the value do not matter. Raises :class:`SwitchError` for a value
    that is no spelling of on or off.
    """
    value = environ.get(MASTER_SWITCH, "")
    word = value.strip().lower()
    if word in ON_SPELLINGS:
        return True
    if not word or word in OFF_SPELLINGS:
        return False
    raise SwitchError(
        f"{MASTER_SWITCH}={value!r} is no switch value: write one of {quoted(ON_SPELLINGS)} for on, "
        f"one of {quoted(OFF_SPELLINGS)} for off, or unset it"
    )


def engine_reads(value: str) -> bool | None:
    """How the engine reads a switch's value; None where it warns and takes its default, off."""
    word = value.lower()
    if word in _ENGINE_ON:
        return True
    return False if word in _ENGINE_OFF else None


def user_value(environ: Mapping[str, str], variable: str) -> str | None:
    """What the user set an engine switch to, or None.

    The empty string counts as unset: the engine takes its default for it. So does a value
    that this package set and that nobody changed since.
    """
    value = environ.get(variable, "")
    return None if not value or _set_by_us(environ).get(variable) == value else value


def variable_changes(environ: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """What to write into an environment so that it holds the wanted values, bookkeeping included.

    Variables that the user set are left out. Empty when everything is as wanted.
    """
    ours = _set_by_us(environ)
    free = {name: value for name, value in wanted.items() if user_value(environ, name) is None}
    changes = {name: value for name, value in free.items() if environ.get(name) != value}
    if changes:
        changes[BOOKKEEPING] = ",".join(f"{name}={value}" for name, value in sorted((ours | changes).items()))
    return changes


def apply_master_switch(environ: MutableMapping[str, str], *, engine_has_own: bool) -> MasterRecord:
    """Set what the master switch turns on and the environment leaves unset.

    Off or unset, nothing is touched. Where the engine has its own switch of this name, its
    part is left to it, and the switch is only respelled if the engine would not read the user's word.
    Call before the engine reads its variables. Raises :class:`SwitchError` as :func:`master_switch`.
    """
    if not master_switch(environ):
        return MasterRecord(on=False)
    if engine_has_own:
        if engine_reads(environ[MASTER_SWITCH]) is None:
            environ[MASTER_SWITCH] = "1"
        return MasterRecord(on=True, left_to_engine=True)
    ours = _set_by_us(environ)
    kept = {name: value for name in MASTER_VARIABLES if (value := user_value(environ, name)) is not None}
    before = {name: ours[name] for name in MASTER_VARIABLES if name in ours and name not in kept}
    now = tuple(name for name in MASTER_VARIABLES if name not in kept and name not in before)
    environ.update(variable_changes(environ, dict.fromkeys(now, "1")))
    return MasterRecord(on=True, set_now=now, set_before=before, kept=kept)


def unknown_variables(environ: Mapping[str, str]) -> tuple[UnknownVariable, ...]:
    """Variables with our prefix, or spelled almost like one of our two, that nothing reads."""
    found = []
    for name in sorted(set(environ) - set(KNOWN_VARIABLES)):
        # 0.85: two wrong letters in our shorter name still match, other SGLANG_ENABLE_ names do not.
        close = difflib.get_close_matches(name.upper(), (SLOTS_VARIABLE, MASTER_SWITCH), n=1, cutoff=0.85)
        if close or name.upper().startswith(PREFIX):
            found.append(UnknownVariable(name=name, meant=close[0] if close else None))
    return tuple(found)


def _set_by_us(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that still hold what this package gave them."""
    pairs = (item.partition("=") for item in environ.get(BOOKKEEPING, "").split(",") if item)
    return {name: value for name, _, value in pairs if environ.get(name) == value}
