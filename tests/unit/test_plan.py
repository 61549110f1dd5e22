"""Plans: what runs, and every reason why something else does not."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_slots import CPU, ENGINE, kernel_slot, registry_of

from sgl_mega_plugin.contract import Feature, Host, Plan, Requirements, Slot, Stage
from sgl_mega_plugin.contract.errors import ConflictError, MissingNeedError, SwitchError, UnknownSlotError
from sgl_mega_plugin.plan import engine_environment, make_plan
from sgl_mega_plugin.registry import Registry
from sgl_mega_plugin.switch import (
    BOOKKEEPING,
    ENGINE_SLOTS,
    MASTER_SWITCH,
    MASTER_VARIABLES,
    SLOTS_VARIABLE,
    apply_master_switch,
)

ACCEPT = kernel_slot("accept_tail", default=True)
MARKOV = kernel_slot("markov", Stage.DRAFT, default=True)
CONTEXT = kernel_slot("context_kv", Stage.COMMIT)
REGISTRY = registry_of(CONTEXT, ACCEPT, MARKOV)
POST_FOLD = "SGLANG_OPT_DSV41_DSPARK_POST_FOLD"
SWITCH_NAMES = [slot.name for slot in ENGINE_SLOTS]
SIXTEEN = [slot.name for slot in ENGINE_SLOTS if slot.engine_switch in MASTER_VARIABLES]


def plan_of(
    *slots: Slot, text: str | None = None, host: Host = ENGINE, registry: Registry | None = None, **environ: str
) -> Plan:
    """A plan of made-up slots, or of the three above, for a slot list and further variables."""
    if text is not None:
        environ[SLOTS_VARIABLE] = text
    chosen = registry or (registry_of(*slots) if slots else REGISTRY)
    return make_plan(registry=chosen, environ=MappingProxyType(environ), host=host)


def names(plan: Plan) -> list[str]:
    return [entry.name for entry in plan.active]


def reasons(plan: Plan, name: str) -> tuple[str, ...]:
    (entry,) = (entry for entry in plan.inactive if entry.name == name)
    return entry.reasons


def test_the_default_set_runs_in_stage_order() -> None:
    plan = plan_of()
    assert names(plan) == ["markov", "accept_tail"]
    assert all(not entry.named and entry.because == "in the default set" for entry in plan.active)
    assert {entry.name for entry in plan.inactive} == {"context_kv", *SWITCH_NAMES}
    assert all(entry.reasons for entry in plan.inactive)
    assert plan.refusals() == []
    assert plan.engine_variables == {}


def test_a_named_slot_comes_before_the_others_of_its_stage() -> None:
    slots = (ACCEPT, kernel_slot("quick_accept"))
    assert names(plan_of(*slots, text="default,quick_accept")) == ["quick_accept", "accept_tail"]
    assert [entry.name for entry in plan_of(*slots, text="all").serving("greedy_accept")] == [
        "accept_tail",
        "quick_accept",
    ]


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (None, "context_kv", "not in the default set; SGLANG_NVIDIA_MEGAKERNEL_SLOTS='default,context_kv'"),
        ("markov", "accept_tail", "not in the list SGLANG_NVIDIA_MEGAKERNEL_SLOTS='markov'"),
        ("-markov", "markov", "switched off by SGLANG_NVIDIA_MEGAKERNEL_SLOTS='-markov'"),
        ("none", "post_fold", "switched off by SGLANG_NVIDIA_MEGAKERNEL_SLOTS='none'"),
    ],
)
def test_reasons_of_the_list(text: str | None, name: str, says: str) -> None:
    (reason,) = reasons(plan_of(text=text), name)
    assert reason.startswith(says)


REQUIRES = [
    pytest.param(
        {"isas": {"sm_90", "sm_100"}}, {"isa": "sm_80"}, "needs ISA sm_100 or sm_90; this machine is 'sm_80'", id="isa"
    ),
    pytest.param({"isas": {"sm_90"}}, {"isa": None}, "needs ISA sm_90; no GPU is visible", id="no-gpu"),
    pytest.param(
        {"dtypes": {"bfloat16"}}, {"dtype": "float32"}, "needs dtype bfloat16; the model has 'float32'", id="dtype"
    ),
    pytest.param(
        {"engine_versions": {"0.5.23"}},
        {"engine_version": "0.6.0"},
        "needs SGLang 0.5.23; this is '0.6.0'",
        id="engine",
    ),
    pytest.param(
        {"engine_versions": {"0.5.23"}},
        {"engine_version": None},
        "needs SGLang 0.5.23; this is 'unknown'",
        id="no-version",
    ),
    pytest.param(
        {"model_types": {"qwen3"}}, {"model_type": "llama"}, "needs model type qwen3; this is 'llama'", id="model"
    ),
    pytest.param(
        {"max_batch": 8}, {"max_batch": 9}, "serves at most 8 requests a step; the server allows 9", id="batch"
    ),
    pytest.param(
        {"declines": {"grammar", "lora", "top_p"}},
        {"features": {Feature.GRAMMAR}},
        "declines feature 'grammar', which this server uses",
        id="feature",
    ),
]


@pytest.mark.parametrize(("requires", "host", "says"), REQUIRES)
@pytest.mark.parametrize("text", [None, "picky"], ids=["default", "named"])
def test_reasons_of_the_host(requires: dict[str, object], host: dict[str, object], says: str, text: str | None) -> None:
    slot = kernel_slot("picky", default=True, requires=Requirements.model_validate(requires))
    plan = plan_of(slot, text=text, host=Host.model_validate(ENGINE.model_dump() | host))
    assert reasons(plan, "picky") == (says,)
    assert plan.refusals() == ([f"slot 'picky': {says}"] if text else [])


def test_a_seam_that_the_runtime_shares_has_no_largest_batch() -> None:
    slot = kernel_slot("picky", default=True, requires=Requirements(max_batch=8))
    host = ENGINE.model_copy(update={"max_batch": 9})

    def sharing(seam: str | None) -> Plan:
        return plan_of(slot, host=host.model_copy(update={"shared_seams": frozenset({seam})}))

    assert [entry.name for entry in sharing(slot.seam).active] == ["picky"]
    assert reasons(sharing("histories"), "picky") == ("serves at most 8 requests a step; the server allows 9",)


@pytest.mark.parametrize(
    ("requires", "host"),
    [
        pytest.param({"isas": {"sm_90"}}, {}, id="isa"),
        pytest.param({"dtypes": {"bfloat16"}}, {"dtype": None}, id="unknown-dtype"),
        pytest.param({"model_types": {"qwen3"}}, {"model_type": None}, id="unknown-model"),
        pytest.param({"max_batch": 8}, {"max_batch": 8}, id="largest-batch"),
        pytest.param({"max_batch": 8}, {"max_batch": None}, id="unknown-batch"),
        pytest.param({"declines": {"grammar"}}, {"features": {Feature.LORA}}, id="other-feature"),
        pytest.param({"engine_versions": {"0.5.23"}}, {"runtime": "embedded", "engine_version": None}, id="no-engine"),
    ],
)
def test_a_host_that_fits(requires: dict[str, object], host: dict[str, object]) -> None:
    slot = kernel_slot("picky", default=True, requires=Requirements.model_validate(requires))
    assert names(plan_of(slot, host=Host.model_validate(ENGINE.model_dump() | host))) == ["picky"]


def test_every_reason_is_given() -> None:
    slot = kernel_slot("picky", requires=Requirements(isas=frozenset({"sm_90"}), dtypes=frozenset({"bfloat16"})))
    assert len(reasons(plan_of(slot, host=CPU), "picky")) == 3


def test_a_closed_seam_is_a_reason() -> None:
    host = ENGINE.model_copy(update={"closed_seams": {"greedy_accept": "this runtime accepts by itself"}})
    assert reasons(plan_of(ACCEPT, host=host), "accept_tail") == ("this runtime accepts by itself",)


@pytest.mark.parametrize("runtime", ["embedded", "none"])
def test_engine_switches_need_the_engine(runtime: str) -> None:
    host = CPU.model_copy(update={"runtime": runtime})
    plan = plan_of(text="all", host=host, **{POST_FOLD: "1", MASTER_SWITCH: "1"})
    assert names(plan) == ["markov", "accept_tail", "context_kv"]
    assert all(f"runtime {runtime!r} has no engine" in reasons(plan, name)[-1] for name in SWITCH_NAMES)
    assert plan.refusals() == []
    assert engine_environment(plan, {}) == {}
    assert "has no engine" in plan_of(text="post_fold", host=host).refusals()[0]


def test_two_named_slots_that_exclude_each_other_are_an_error_on_any_host() -> None:
    slots = (ACCEPT, kernel_slot("other_accept", conflicts=frozenset({"accept_tail"})))
    for host, text in itertools.product((ENGINE, CPU), ("accept_tail,other_accept", "other_accept,accept_tail")):
        with pytest.raises(ConflictError, match=r"'accept_tail' .*'other_accept' .*exclude each other"):
            plan_of(*slots, text=text, host=host)


@pytest.mark.parametrize("conflicts_of", ["accept_tail", "other_accept"])
def test_a_default_slot_gives_way_to_a_named_one(conflicts_of: str) -> None:
    pair = {"accept_tail", "other_accept"}
    slots = [
        kernel_slot(
            name, default=name == "accept_tail", conflicts=frozenset(pair - {name} if name == conflicts_of else ())
        )
        for name in sorted(pair)
    ]
    plan = plan_of(*slots, text="default,other_accept")
    assert names(plan) == ["other_accept"]
    assert reasons(plan, "accept_tail") == ("excluded by slot 'other_accept', which runs here",)
    assert plan.refusals() == []


def test_of_two_default_slots_the_first_stays_unless_it_cannot_run() -> None:
    first = kernel_slot("first", default=True, requires=Requirements(isas=frozenset({"sm_90"})))
    second = kernel_slot("second", default=True, conflicts=frozenset({"first"}))
    assert names(plan_of(first, second)) == ["first"]
    assert names(plan_of(first, second, host=CPU)) == ["second"]


def test_a_named_slot_without_its_need_is_an_error() -> None:
    slots = (ACCEPT, kernel_slot("needy", Stage.COMMIT, needs=frozenset({"accept_tail"})))
    with pytest.raises(MissingNeedError, match=r"'needy' .*needs slot 'accept_tail', which is off: not in the list"):
        plan_of(*slots, text="needy")
    assert names(plan_of(*slots, text="needy,accept_tail")) == ["accept_tail", "needy"]
    assert names(plan_of(*slots, text="default,needy")) == ["accept_tail", "needy"]


def test_a_need_that_cannot_run_takes_along_what_needs_it() -> None:
    base = kernel_slot("base", default=True, requires=Requirements(isas=frozenset({"sm_90"})))
    middle = kernel_slot("middle", Stage.GLUE, default=True, needs=frozenset({"base"}))
    top = kernel_slot("top", Stage.COMMIT, default=True, needs=frozenset({"middle"}))
    plan = plan_of(base, middle, top, host=CPU)
    assert names(plan) == []
    assert reasons(plan, "top") == ("needs 'middle', which does not run here",)
    assert plan_of(base, middle, top, host=CPU, text="default,top").refusals() == [
        "slot 'top': needs 'middle', which does not run here"
    ]


def test_what_a_named_slot_needs_stays_before_other_defaults() -> None:
    rival = kernel_slot("rival", Stage.DRAFT, default=True, conflicts=frozenset({"base"}))
    base = kernel_slot("base", default=True)
    top = kernel_slot("top", Stage.COMMIT, needs=frozenset({"base"}))
    assert names(plan_of(rival, base, top)) == ["rival"]
    assert names(plan_of(rival, base, top, text="default,top")) == ["base", "top"]


def test_the_master_switch_turns_on_the_sixteen_and_the_defaults() -> None:
    plan = plan_of(**{MASTER_SWITCH: "on"})
    assert set(names(plan)) == {"markov", "accept_tail", *SIXTEEN}
    assert plan.engine_variables == dict.fromkeys(MASTER_VARIABLES, "1")
    assert all(entry.because == f"turned on by {MASTER_SWITCH}" for entry in plan.active if entry.name in SIXTEEN)
    stages = [list(Stage).index(entry.provided.slot.stage) for entry in plan.active]
    assert stages == sorted(stages)


def test_a_list_of_our_slots_leaves_the_sixteen_to_the_master_switch() -> None:
    plan = plan_of(text="markov", **{MASTER_SWITCH: "1"})
    assert set(names(plan)) == {"markov", *SIXTEEN}
    assert names(plan_of(text="none", **{MASTER_SWITCH: "1"})) == []


def test_naming_an_engine_switch_turns_it_on() -> None:
    plan = plan_of(text="post_fold")
    assert [(entry.name, entry.named) for entry in plan.active] == [("post_fold", True)]
    assert engine_environment(plan, {}) == {POST_FOLD: "1", BOOKKEEPING: f"{POST_FOLD}=1"}


def test_the_explicit_switch_wants_its_name() -> None:
    variable = "SGLANG_OPT_DSV41_DSPARK_SIM_DRAW_AHEAD"
    assert "sim_draw_ahead" not in names(plan_of(**{MASTER_SWITCH: "1"}))
    assert plan_of(text="default,sim_draw_ahead").engine_variables == {variable: "1"}


@pytest.mark.parametrize("master", ["0", "1"])
@pytest.mark.parametrize("applied", [False, True], ids=["plan-first", "switch-first"])
def test_removing_an_engine_switch_turns_it_off(master: str, applied: bool) -> None:
    environ = {MASTER_SWITCH: master, SLOTS_VARIABLE: "-post_fold"}
    if applied:
        apply_master_switch(environ, engine_has_own=False)
    plan = make_plan(registry=REGISTRY, environ=environ, host=ENGINE)
    assert reasons(plan, "post_fold") == (f"switched off by {SLOTS_VARIABLE}='-post_fold'",)
    environ.update(engine_environment(plan, environ))
    assert environ[POST_FOLD] == "0"
    # A later process makes the same plan from what it inherits, and finds nothing left to do.
    apply_master_switch(environ, engine_has_own=False)
    assert make_plan(registry=REGISTRY, environ=environ, host=ENGINE) == plan
    assert engine_environment(plan, environ) == {}


def test_a_value_in_the_environment_wins_over_a_removal() -> None:
    plan = plan_of(text="-post_fold", **{POST_FOLD: "1"})
    (entry,) = (entry for entry in plan.active if entry.name == "post_fold")
    assert entry.because == f"{POST_FOLD}='1' in the environment wins over its removal in the list"
    assert POST_FOLD not in plan.engine_variables


@pytest.mark.parametrize(
    ("value", "says"),
    [("0", "switches it off; unset the variable"), ("on", "is no switch value to the engine, which reads it as off")],
)
def test_a_value_in_the_environment_wins_over_the_list_and_the_master_switch(value: str, says: str) -> None:
    for environ in ({SLOTS_VARIABLE: "post_fold"}, {MASTER_SWITCH: "1"}):
        plan = plan_of(**{POST_FOLD: value, **environ})
        (reason,) = reasons(plan, "post_fold")
        assert f"{POST_FOLD}={value!r}" in reason
        assert says in reason
        assert POST_FOLD not in plan.engine_variables
        assert len(plan.refusals()) == (SLOTS_VARIABLE in environ)


def test_a_switch_set_by_the_user_runs_without_a_list_entry() -> None:
    plan = plan_of(text="none", **{POST_FOLD: "yes"})
    assert [(entry.name, entry.named) for entry in plan.active] == [("post_fold", False)]


def test_removing_a_switch_takes_along_what_needs_it() -> None:
    plan = plan_of(text="-defer_context_kv", **{MASTER_SWITCH: "1"})
    assert reasons(plan, "one_launch_commit_stage") == ("needs 'defer_context_kv', which does not run here",)
    off = {name for name, value in plan.engine_variables.items() if value == "0"}
    assert off == {"SGLANG_DSPARK_DEFER_CONTEXT_KV", "SGLANG_OPT_DSV41_DSPARK_ONE_LAUNCH_COMMIT_STAGE"}


def test_our_slot_before_the_engine_switch_that_it_excludes() -> None:
    mine = kernel_slot("accept_tail", default=True, conflicts=frozenset({"fused_accept_tail"}))
    variable = "SGLANG_DSPARK_FUSED_ACCEPT_TAIL"
    plan = plan_of(mine, **{MASTER_SWITCH: "1"})
    assert "accept_tail" in names(plan)
    assert reasons(plan, "fused_accept_tail") == ("excluded by slot 'accept_tail', which runs here",)
    assert plan.engine_variables[variable] == "0"
    fixed = plan_of(mine, **{variable: "1"})
    assert reasons(fixed, "accept_tail") == ("excluded by slot 'fused_accept_tail', which runs here",)
    with pytest.raises(ConflictError, match=f"{variable}='1' in the environment"):
        plan_of(mine, text="accept_tail", **{variable: "1"})
    assert names(plan_of(mine, text="accept_tail", host=CPU, **{variable: "1"})) == ["accept_tail"]


def test_what_the_environment_fixes_runs_whatever_other_slots_say() -> None:
    """The engine does what its variables say, so the plan must not claim otherwise."""
    early = {"SGLANG_OPT_DSV41_TARGET_METADATA_EARLY": "1"}
    assert names(plan_of(text="none", **early)) == ["target_metadata_early"]
    base, other = (slot for slot in ENGINE_SLOTS if slot.name in ("mid_fold", "post_fold"))
    rival = other.model_copy(update={"conflicts": frozenset({base.name})})
    both = {str(base.engine_switch): "1", str(rival.engine_switch): "1"}
    assert names(plan_of(registry=registry_of(base, rival, engine=False), text="none", **both)) == [
        "mid_fold",
        "post_fold",
    ]


def test_another_engine_version_is_left_alone() -> None:
    host = ENGINE.model_copy(update={"engine_version": "0.6.0"})
    plan = plan_of(host=host, **{MASTER_SWITCH: "1"})
    assert names(plan) == ["markov", "accept_tail"]
    assert plan.engine_variables == {}
    assert plan_of(host=host, text="-post_fold", **{MASTER_SWITCH: "1"}).engine_variables == {POST_FOLD: "0"}


@pytest.mark.parametrize(
    ("environ", "error"),
    [({SLOTS_VARIABLE: "accept_tial"}, UnknownSlotError), ({MASTER_SWITCH: "maybe"}, SwitchError)],
    ids=["unknown-name", "no-spelling"],
)
def test_what_cannot_be_read_is_raised(environ: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        plan_of(**environ)


def test_a_plan_is_data() -> None:
    plan = plan_of(text="default,post_fold", host=CPU.model_copy(update={"features": frozenset(Feature)}))
    dumped = plan.model_dump(mode="json")
    assert Plan.model_validate_json(json.dumps(dumped)) == plan
    assert dumped["host"]["features"] == sorted(feature.value for feature in Feature)


def test_two_processes_write_the_same_plan() -> None:
    program = """
from made_slots import ENGINE, kernel_slot, registry_of
from sgl_mega_plugin.contract import Requirements
from sgl_mega_plugin.plan import make_plan
isas = frozenset({"sm_90", "sm_100", "sm_103", "sm_120"})
slot = kernel_slot("accept_tail", default=True, requires=Requirements(isas=isas), conflicts=isas)
print(make_plan(registry=registry_of(slot), environ={}, host=ENGINE).model_dump_json())
"""
    program = f"import sys; sys.path[:] = {sys.path!r}\n" + program
    texts = {
        subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


@st.composite
def made_registries(draw: st.DrawFn) -> Registry:
    """Five slots in random stages that exclude and need each other at random."""
    pool = ["a", "b", "c", "d", "e"]
    others = st.frozensets(st.sampled_from(pool), max_size=2)
    stages = st.sampled_from([Stage.DRAFT, Stage.VERIFY_ACCEPT, Stage.GLUE, Stage.COMMIT])
    slots = []
    for name in pool:
        isas = frozenset({draw(st.sampled_from(["sm_90", "sm_100"]))}) if draw(st.booleans()) else frozenset()
        slots.append(
            kernel_slot(
                name,
                draw(stages),
                default=draw(st.booleans()),
                conflicts=draw(others) - {name},
                needs=draw(others) - {name},
                requires=Requirements(isas=isas),
            )
        )
    return registry_of(*slots, engine=False)


@settings(deadline=None)
@given(made_registries(), st.lists(st.sampled_from(["a", "b", "-c", "d", "-e", "all", "default"]), max_size=4))
def test_any_plan_is_consistent(registry: Registry, terms: list[str]) -> None:
    """Each slot is decided once; what runs fits together; what does not has reasons."""
    try:
        plan = make_plan(registry=registry, environ={SLOTS_VARIABLE: ",".join(terms)}, host=ENGINE)
    except (ConflictError, MissingNeedError):
        return
    running = set(names(plan))
    assert sorted([*running, *(entry.name for entry in plan.inactive)]) == ["a", "b", "c", "d", "e"]
    for entry in plan.active:
        slot = entry.provided.slot
        assert slot.needs <= running, f"{slot.name} runs without {slot.needs - running}"
        assert not slot.conflicts & running, f"{slot.name} runs beside {slot.conflicts & running}"
        assert slot.requires.isas <= {"sm_90"}
    assert all(entry.reasons for entry in plan.inactive)
