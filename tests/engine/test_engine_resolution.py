"""The whole resolution of a server's settings with the flag: what starts, and the words that stop the rest."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_configs import write_draft, write_target
from engine_server import refusal, resolve
from sglang.kernels.plugin_kernels.nvidia import spec
from sglang.srt.kernel_plugins.nvidia import binding

from sgl_mega_plugin.engine import entry, families, version
from sgl_mega_plugin.switch import BOOKKEEPING, ENGINE_SLOTS, MASTER_SWITCH, MASTER_VARIABLES, SLOTS_VARIABLE

POST_FOLD = "SGLANG_OPT_DSV41_DSPARK_POST_FOLD"
ACCEPTED = [
    pytest.param("Qwen3ForCausalLM", "Qwen3DSparkModel", {}, "sm_90", id="qwen3"),
    pytest.param("Qwen3ForCausalLM", "DSparkDraftModel", {}, "sm_100", id="qwen3-generic-draft-sm_100"),
    pytest.param("Qwen3MoeForCausalLM", "Qwen3DSparkModel", {}, "sm_103", id="qwen3-moe-sm_103"),
    pytest.param("LlamaForCausalLM", "DSparkDraftModel", {}, "sm_120", id="llama-sm_120"),
    pytest.param("Qwen3ForCausalLM", "Qwen3DSparkModel", {"tp_size": 2}, "sm_90", id="tp-2-leaves-markov-out"),
    pytest.param("Qwen3ForCausalLM", "Qwen3DSparkModel", {"dtype": "float16"}, "sm_90", id="float16-leaves-markov-out"),
    pytest.param("Qwen3ForCausalLM", "Qwen3DSparkModel", {"disable_cuda_graph": True}, "sm_90", id="no-graphs"),
]


@pytest.mark.parametrize(("architecture", "draft_architecture", "settings", "isa"), ACCEPTED)
def test_a_served_configuration_starts(
    architecture: str,
    draft_architecture: str,
    settings: dict[str, Any],
    isa: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(binding, "device_isa", lambda: isa)
    with caplog.at_level(logging.INFO, logger=binding.__name__):
        resolve(write_target(tmp_path / "t", architecture), write_draft(tmp_path / "d", draft_architecture), **settings)
    assert f"--enable-nvidia-megakernel: sgl-mega-plugin target on {isa}" in caplog.text
    assert not [name for name in MASTER_VARIABLES if name in os.environ]


@dataclass(frozen=True)
class Refused:
    """A configuration that must not start, and what its refusal has to say."""

    id: str
    words: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)


MARKOV = {SLOTS_VARIABLE: "markov"}
REFUSED = [
    Refused("slot-misspelled", ("'accept_tial'", "'accept_tail'"), {SLOTS_VARIABLE: "accept_tial"}),
    Refused("list-without-comma", ("separate terms with commas",), {SLOTS_VARIABLE: "markov mid_fold"}),
    Refused("upstream-name", ("'hop_a'", "nothing installed here provides it"), {SLOTS_VARIABLE: "hop_a"}),
    Refused("switch-misspelled", (f"{MASTER_SWITCH}='maybe'", "'on'", "'off'"), {MASTER_SWITCH: "maybe"}),
    Refused("seam-not-called", ("slot 'accept_tail'", "'greedy_accept'"), {SLOTS_VARIABLE: "accept_tail"}),
    Refused("named-tp-2", ("slot 'markov'", "tensor parallelism"), MARKOV, {"tp_size": 2}),
    Refused("named-no-graphs", ("slot 'markov'", "CUDA graphs are off"), MARKOV, {"disable_cuda_graph": True}),
    Refused("named-float16", ("slot 'markov'", "'float16'"), MARKOV, {"dtype": "float16"}),
    Refused(
        "named-not-folded",
        ("slot 'markov'", "SGLANG_DSPARK_FOLDED_PROPOSAL is off"),
        {**MARKOV, "SGLANG_DSPARK_FOLDED_PROPOSAL": "0"},
    ),
    Refused("named-odd-head", ("slot 'markov'", "'wider'"), MARKOV, draft={"markov_head_type": "wider"}),
    Refused("named-other-draft", ("'Lfm2DSparkDraftModel'",), MARKOV, draft={"architecture": "Lfm2DSparkDraftModel"}),
    Refused(
        "not-in-SGLANG_PLUGINS", ("SGLANG_PLUGINS='another'", "'nvidia_megakernel'"), {"SGLANG_PLUGINS": "another"}
    ),
    Refused("ragged-verify", ("does not accept it",), {"SGLANG_RAGGED_VERIFY_MODE": "compact"}),
    Refused("deterministic", ("deterministic inference is in use",), settings={"enable_deterministic_inference": True}),
    Refused("memory-release", ("memory release is in use",), settings={"enable_memory_saver": True}),
    Refused("float32", ("dtype 'float32'", "'bfloat16'"), settings={"dtype": "float32"}),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_a_configuration_that_cannot_be_served_stops_in_words(case: Refused, target: str, tmp_path: Path) -> None:
    os.environ.update(case.environ)
    message = refusal(target, write_draft(tmp_path / "d", **case.draft), **case.settings)
    assert [word for word in case.words if word not in message] == [], message
    assert not [name for name in MASTER_VARIABLES if name in os.environ], "a refused server set an engine switch"


def test_without_dspark_the_flag_is_refused(target: str) -> None:
    message = refusal(target, None)
    assert "speculative algorithm None is not 'DSPARK'" in message
    assert "--speculative-draft-model-path" in message


def test_an_older_gpu_is_refused(target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "device_isa", lambda: "sm_80")
    assert "not sm_80" in refusal(target, draft)


def test_a_family_without_a_spec_is_refused_by_name(draft: str, tmp_path: Path) -> None:
    target = write_target(tmp_path / "t", "Qwen2ForCausalLM", model_type="qwen2")
    assert "no megakernel spec is registered for ['Qwen2ForCausalLM']" in refusal(target, draft)


def test_every_reason_is_listed_at_once(target: str, draft: str) -> None:
    os.environ[SLOTS_VARIABLE] = "markov,step_inputs"
    message = refusal(target, draft, tp_size=2, enable_memory_saver=True)
    assert all(word in message for word in ("memory release", "slot 'markov'", "slot 'step_inputs'")), message


def test_an_unsupported_release_is_refused(target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed_version", lambda name: "0.5.24")
    message = refusal(target, draft)
    assert "SGLang 0.5.24 is not supported: sgl-mega-plugin serves SGLang 0.5.23" in message


def test_api_version_2_is_refused_by_its_number(target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "MEGAKERNEL_API_VERSION", 2)
    message = refusal(target, draft)
    assert "uses megakernel API version 1; this SGLang requires version 2" in message


def test_the_plugins_own_words_for_api_version_2() -> None:
    assert version.api_reasons(2) == [
        "megakernel API version 2 is not served: sgl-mega-plugin implements version 1; "
        "use SGLang 0.5.23, or a newer sgl-mega-plugin"
    ]


@pytest.mark.parametrize("release", ["0.5.23", "0.5.23+cu130"], ids=["plain", "local-label"])
def test_a_served_release_has_no_reasons(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed_version", lambda name: release)
    assert version.reasons() == []


def test_no_engine_is_put_into_words() -> None:
    assert version.release_reasons(None)[0].startswith("no installed SGLang is not supported")


def _fake_distribution(folder: Path, name: str, points: str) -> str:
    info = folder / f"{name.replace('-', '_')}-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    (info / "entry_points.txt").write_text(f"[{version.ENTRY_POINT_GROUP}]\n{points}\n")
    return str(folder)


def test_two_distributions_with_the_entry_point_are_refused(
    target: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _fake_distribution(tmp_path / "site", "sgl-nvidia-mega", "nvidia_megakernel = os:getcwd")
    monkeypatch.syspath_prepend(folder)  # found first, so that ours is the one SGLang keeps
    ours = importlib.metadata.version("sgl-mega-plugin")
    message = refusal(target, draft)
    assert f"sgl-mega-plugin {ours}, sgl-nvidia-mega 9.9" in message
    assert "uninstall all but one" in message


def test_two_distributions_are_refused_even_where_sglang_drops_ours(
    target: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia = _fake_distribution(tmp_path / "last", "sgl-nvidia-mega", "nvidia_megakernel = os:getcwd")
    second = _fake_distribution(
        tmp_path / "second", "sgl-mega-second-name", "sgl_mega_plugin = sgl_mega_plugin.engine.entry:register"
    )
    monkeypatch.setattr(sys, "path", [second, *sys.path, nvidia])
    assert "sgl-nvidia-mega 9.9" in refusal(target, draft)


def test_a_draft_spec_of_another_plugin_is_refused_with_both_named(target: str, draft: str) -> None:
    spec.register(architecture="Qwen3DSparkModel", path="another.plugin:SPEC")
    message = refusal(target, draft)
    assert "another.plugin:SPEC" in message
    assert entry.DRAFT_PATH in message


def test_a_target_spec_of_another_plugin_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    spec.register(architecture="LlamaForCausalLM", path="another.plugin:SPEC")
    entry.register()
    assert spec._REGISTRY["LlamaForCausalLM"] == "another.plugin:SPEC"
    assert spec._REGISTRY["Qwen3ForCausalLM"] == entry.TARGET_PATH
    assert "another.plugin:SPEC" in caplog.text


def test_registering_twice_changes_nothing() -> None:
    entry.register()
    first = dict(spec._REGISTRY), dict(os.environ)
    entry.register()
    assert (dict(spec._REGISTRY), dict(os.environ)) == first
    assert set(first[0]) == {*families.ALL_TARGETS, *families.ALL_DRAFTS}
    assert entry.conflicts == {}


def test_what_the_entry_function_cannot_do_is_a_reason(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("no environment today")

    monkeypatch.setattr(entry, "_apply_master_switch", fail)
    assert "entry function failed: OSError: no environment today" in refusal(target, draft)


def test_an_entry_function_that_raises_is_reported_by_sglang(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("broken install")

    monkeypatch.setattr(entry, "register", fail)
    assert "registered no spec; see 'Failed to load plugin'" in refusal(target, draft)


@pytest.mark.parametrize(
    ("value", "user", "on"),
    [
        ("1", {}, set(MASTER_VARIABLES)),
        (" On ", {}, set(MASTER_VARIABLES)),
        ("1", {POST_FOLD: "0"}, set(MASTER_VARIABLES) - {POST_FOLD}),
        ("0", {POST_FOLD: "1"}, {POST_FOLD}),
        ("", {}, set()),
        (None, {}, set()),
        ("maybe", {}, set()),
    ],
    ids=["on", "odd-spelling", "the-users-value-wins", "off", "blank", "unset", "misspelled"],
)
def test_the_master_switch_sets_the_sixteen_at_load(value: str | None, user: dict[str, str], on: set[str]) -> None:
    from sglang.srt.environ import envs
    from sglang.srt.plugins import load_plugins

    assert len(MASTER_VARIABLES) == 16
    os.environ.update(user)
    if value is not None:
        os.environ[MASTER_SWITCH] = value
    load_plugins()
    assert {name for name in MASTER_VARIABLES if getattr(envs, name).get()} == on
    assert os.environ.get(MASTER_SWITCH) == value


def test_the_engines_own_switch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.environ import EnvBool, Envs
    from sglang.srt.plugins import load_plugins

    monkeypatch.setattr(Envs, MASTER_SWITCH, EnvBool(False), raising=False)
    os.environ[MASTER_SWITCH] = "1"
    load_plugins()
    assert not [name for name in (*MASTER_VARIABLES, BOOKKEEPING) if name in os.environ]


@pytest.mark.parametrize(
    ("environ", "flag", "want"),
    [
        ({SLOTS_VARIABLE: "default,post_fold"}, True, "1"),
        ({SLOTS_VARIABLE: "default,post_fold"}, False, None),
        ({SLOTS_VARIABLE: "-post_fold", MASTER_SWITCH: "1"}, True, "0"),
        ({SLOTS_VARIABLE: "-post_fold", MASTER_SWITCH: "1"}, False, "1"),
        ({SLOTS_VARIABLE: "-post_fold", POST_FOLD: "1"}, True, "1"),
    ],
    ids=["named", "named-without-the-flag", "removed", "removed-without-the-flag", "the-users-value-wins"],
)
def test_the_list_sets_an_engine_switch_where_the_flag_is(
    environ: dict[str, str], flag: bool, want: str | None, target: str, draft: str
) -> None:
    os.environ.update(environ)
    resolve(target, draft, enable_nvidia_megakernel=flag)
    assert os.environ.get(POST_FOLD) == want


def test_every_engine_switch_is_one_of_sglangs_and_off_by_default() -> None:
    from sglang.srt.environ import envs

    assert {slot.engine_switch for slot in ENGINE_SLOTS if getattr(envs, slot.engine_switch or "").get()} == set()
    assert {slot.requires.engine_versions for slot in ENGINE_SLOTS} == {version.ENGINE_VERSIONS}
    assert not version.engine_has_switch(MASTER_SWITCH)


def test_the_names_of_the_entry_point_are_sglangs() -> None:
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP

    assert (version.ENTRY_POINT_GROUP, version.ENTRY_POINT) == (GENERAL_PLUGINS_GROUP, spec.ENTRY_POINT)
    assert version.api_version() == version.API_VERSION


@pytest.mark.parametrize("path", [entry.TARGET_PATH, entry.DRAFT_PATH])
def test_find_spec_accepts_each_spec(path: str) -> None:
    entry.register()
    architectures = families.ALL_TARGETS if path == entry.TARGET_PATH else families.ALL_DRAFTS
    for architecture in architectures:
        found, why = spec.find_spec(architectures=[architecture], isa="sm_90")
        assert why == "", architecture
        assert found is not None
        assert found.max_rows == 0
