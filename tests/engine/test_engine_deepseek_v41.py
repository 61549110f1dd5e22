"""The reduced DeepSeek-V4.1 of ``tools/make_deepseek_v41.py`` against SGLang's code, as far as that goes without a GPU.

SGLang's configuration class loads it, its tokenizer and its n-gram tables fit each other, its target and its draft are
built on tensors without storage, and a server's settings resolve with and without the flag.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_deepseek_v41
import pytest
from engine_server import refusal, resolve
from engine_v41 import blocks_of_the_bundled_head, built_on_meta
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.kernel_plugins.nvidia import binding

from sgl_mega_plugin.engine import families, host, planning
from sgl_mega_plugin.engine.fold import reasons as fold
from sgl_mega_plugin.switch import ENGINE_SLOTS, MASTER_SWITCH, MASTER_VARIABLES, SLOTS_VARIABLE

SECONDS = 240  # a spawned process imports SGLang's models
#: The one-user settings of docs/serving-deepseek-v4.1.md, but for what asks for Blackwell or several GPUs.
ONE_USER: dict[str, Any] = {
    "attention_backend": None,  # the model's own
    "speculative_algorithm": "DSPARK",
    "speculative_dspark_block_size": 5,
    "dsv4_attn_backend": "flashmla",
    "kv_cache_dtype": "fp8_e4m3",
    "max_running_requests": 1,
    "cuda_graph_max_bs_decode": 1,
    "mem_fraction_static": 0.8,
}
FP4_EXPERTS = "SGLANG_DSV4_FP4_EXPERTS"


@pytest.fixture
def v41(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(FP4_EXPERTS, "0")
    make_deepseek_v41.main([str(tmp_path / "v41")])
    return str(tmp_path / "v41")


def _launch(record: Any) -> host.Launch:
    return host.from_settings(resolving_view(record), model_config_of(record).hf_config)


@pytest.mark.parametrize("layers", make_deepseek_v41.LAYERS)
def test_sglangs_configuration_class_keeps_every_field(layers: int) -> None:
    from sglang.srt.configs.deepseek_v41 import DeepseekV41Config
    from sglang.srt.utils.hf_transformers_utils import get_rope_config

    written = make_deepseek_v41.make_config(layers=layers)
    loaded = DeepseekV41Config(**written)
    theta, scaling = get_rope_config(loaded)
    assert (theta, dict(scaling) | written["rope_scaling"]) == (written["rope_theta"], dict(scaling))
    renamed = {"rope_theta", "rope_scaling", "torch_dtype"}
    found = {name: getattr(loaded, name, "nothing") for name in written.keys() - renamed}
    assert found == {name: written[name] for name in found}
    assert str(loaded.dtype).removeprefix("torch.") == written["torch_dtype"]


def test_a_layers_shapes_are_the_defaults_of_sglangs_configuration_class() -> None:
    from dataclasses import MISSING, fields

    from sglang.srt.configs.deepseek_v4 import DeepSeekV4Config

    defaults = {field.name: field.default for field in fields(DeepSeekV4Config) if field.default is not MISSING}
    written = make_deepseek_v41.make_config()
    shapes = {
        "hidden_size", "num_attention_heads", "num_key_value_heads", "qk_nope_head_dim", "qk_rope_head_dim",
        "q_lora_rank", "o_lora_rank", "o_groups", "kv_lora_rank", "v_head_dim", "index_head_dim", "index_n_heads",
        "index_topk", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
        "hc_mult", "vocab_size",
    }  # fmt: skip
    assert {name: written[name] for name in shapes} == {name: defaults[name] for name in shapes}
    assert written["sliding_window"] == defaults["window_size"]
    assert written["head_dim"] == defaults["qk_nope_head_dim"] + defaults["qk_rope_head_dim"]


@pytest.mark.parametrize("layers", make_deepseek_v41.LAYERS)
def test_the_n_gram_tables_have_the_rows_that_sglang_hashes_into(layers: int) -> None:
    from sglang.srt.configs.deepseek_v41 import DeepseekV41Config
    from sglang.srt.layers.engram import EngramLayout

    layout = EngramLayout.from_config(DeepseekV41Config(**make_deepseek_v41.make_config(layers=layers, buckets=300)))
    assert layout is not None
    bounds = [layout.column_bounds(index)[-1] for index in range(len(layout.layer_ids))]
    assert list(layout.num_embeddings) == bounds


def test_the_tokenizer_has_as_many_normalized_words_as_the_configuration_says(tmp_path: Path) -> None:
    from sglang.srt.layers.engram import build_compressed_token_map
    from transformers import AutoTokenizer

    make_deepseek_v41.write_tokenizer(tmp_path, vocab_size=2_000)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    lookup, normalized = build_compressed_token_map(tokenizer)
    assert (len(lookup), normalized) == (2_000, 2_000)
    assert tokenizer("w0 w1 nothing", add_special_tokens=False)["input_ids"] == [4, 5, 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "fp8"), [("class", False), ("class", True), ("released", True)], ids=str)
def test_sglang_builds_target_and_draft_from_it(
    shape: str, fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: the model parallel groups that this starts are global."""
    monkeypatch.setenv(FP4_EXPERTS, "0")
    folder = str(tmp_path / "v41")
    make_deepseek_v41.main([folder, "--shape", shape, *(["--fp8"] if fp8 else [])])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        built = pool.apply_async(built_on_meta, (folder,)).get(SECONDS)
    config = make_deepseek_v41.make_config(shape=shape, fp8=fp8)
    parameters = built["target"] | built["draft"]
    hidden, intermediate = config["hidden_size"], config["moe_intermediate_size"]
    for name, experts in (
        ("model.layers.0", config["n_routed_experts"]),
        ("stages.0", config["dspark_n_routed_experts"]),
    ):
        shape, size = parameters[f"{name}.mlp.experts.w13_weight"]
        assert shape == (experts, 2 * intermediate, hidden)
        assert size == experts * 2 * intermediate * hidden * (1 if fp8 else 2)

    def layers_with(part: str) -> list[int]:
        return sorted({int(name.split(".")[2]) for name in built["target"] if part in name})

    assert layers_with(".compressor.wkv.") == config["kv_source_layer_ids"]
    assert layers_with(".indexer.wq_b.") == config["index_source_layer_ids"]
    assert layers_with(".engram.embed.") == config["engram_layer_ids"]
    stages = {int(name.split(".")[1]) for name in built["draft"] if name.startswith("stages.")}
    assert sorted(stages) == list(range(make_deepseek_v41.STAGES))
    assert built["stage_inputs"] == make_deepseek_v41.STAGES * hidden
    # What the seam of the draft block serves by step logits that are kept in fp32.
    assert built["step_logits"] == ("bfloat16", "float32")
    # What the estimate leaves out: attention and the n-gram projections, at most 0.6 GiB a layer in bfloat16.
    gib = sum(size for _, size in parameters.values()) / 2**30
    assert (
        0 < gib - make_deepseek_v41.weight_gib(config) < 0.6 * (config["num_hidden_layers"] + make_deepseek_v41.STAGES)
    )


@pytest.mark.parametrize("arguments", [["--layers", "4"], ["--layers", "8", "--fp8"]], ids=["4-layers", "8-layers-fp8"])
@pytest.mark.parametrize("flag", [False, True], ids=["without-the-flag", "with-the-flag"])
def test_a_servers_settings_resolve(
    arguments: list[str], flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(tmp_path / "v41")
    make_deepseek_v41.main([folder, "--experts", "8", *arguments])
    with caplog.at_level(logging.INFO):
        record = resolve(folder, None, enable_nvidia_megakernel=flag, **ONE_USER)
    settings = resolving_view(record)
    assert settings.speculative_draft_model_path == folder
    assert (settings.speculative_num_draft_tokens, settings.kv_cache_dtype) == (6, "fp8_e4m3")
    assert (settings.dsv4_attn_backend, settings.page_size) == ("flashmla", 256)
    assert model_config_of(record).hf_config.model_type == "deepseek_v41"
    assert ("sgl-mega-plugin target on sm_90" in caplog.text) is flag


def test_the_draft_is_loaded_under_the_name_that_our_spec_has(v41: str) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    record = resolve(v41, None, **ONE_USER)
    draft = ModelConfig(v41, is_draft_model=True, speculative_algorithm="DSPARK")
    assert _launch(record).draft_architectures == tuple(draft.hf_config.architectures)
    assert set(draft.hf_config.architectures) <= set(families.BUNDLED_DRAFTS.values())


def test_our_step_leaves_what_sglangs_block_leaves_with_the_bundled_head() -> None:
    cases = [(1, [0.0], True), (1, [0.9], False), (5, [1.0, 0.0, 0.3, 0.0, 1.2], False)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply_async(blocks_of_the_bundled_head, (cases,)).get(SECONDS)
    for (_, _, greedy), block in zip(cases, found, strict=True):
        assert block["reasons"] == []
        assert block["tokens"][0] == block["tokens"][1]
        assert block["offsets"][0] == block["offsets"][1]
        assert block["dtypes"] == ([] if greedy else ["float32", "float32"])
        assert len(block["logits"]) == 2 * (not greedy)
        assert block["logits"][:1] == block["logits"][1:]
        assert block["rows of the embedding"] == 64  # 45 tokens and SGLang's padding


def test_the_engines_switches_run_and_our_slots_say_why_they_do_not(v41: str) -> None:
    os.environ[MASTER_SWITCH] = "1"
    record = resolve(v41, None, **ONE_USER)
    plan = planning.plan_for(_launch(record), os.environ)
    mastered = {slot.name for slot in ENGINE_SLOTS if slot.engine_switch in MASTER_VARIABLES}
    assert {entry.name for entry in plan.active} == mastered | {"markov"}
    reasons = {entry.name: " ".join(entry.reasons) for entry in plan.inactive}
    for name in ("accept_tail", "blockwise_rejection", "context_kv", "relay"):
        assert "SGLang commits that in an epilogue of its own" in reasons[name], name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("draft_lm_head", "its streams are collapsed and normalised in front of the LM head"),
        ("accept_tail", "in an epilogue of its own"),
    ],
)
def test_a_named_slot_of_ours_is_refused_before_weights_load(name: str, words: str, v41: str) -> None:
    os.environ[SLOTS_VARIABLE] = name
    message = refusal(v41, None, **ONE_USER)
    assert f"slot {name!r}: " in message
    assert words in message


def test_a_dense_draft_changes_nothing_of_what_the_target_commits(v41: str, draft: str) -> None:
    record = resolve(v41, draft, **ONE_USER)
    assert any("epilogue of its own" in reason for reason in fold.fold_reasons(_launch(record)))


def test_the_model_before_it_is_refused_with_its_type(v41: str) -> None:
    """DeepSeek-V4 has the same architecture: the spec tells them apart by model type."""
    path = Path(v41) / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "deepseek_v4", "compress_ratios": [0, 0, 4, 4, 128, 128, 0]}
    path.write_text(json.dumps(config))
    message = refusal(v41, None, **ONE_USER)
    assert "model type 'deepseek_v4' of 'DeepseekV4ForCausalLM' is not served, only 'deepseek_v41'" in message


@pytest.mark.parametrize(("value", "runner"), [(None, "flashinfer_mxfp4"), ("0", "auto")], ids=["unset", "0"])
def test_the_expert_kernels_follow_a_variable_on_hopper(
    value: str | None, runner: str, v41: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The made-up weights are not MXFP4, so the documented command sets the variable."""
    from sglang.srt.arg_groups.model_overrides import deepseek_v4

    hopper = SimpleNamespace(is_hip=False, is_sm90=True, is_sm100=False, is_sm120=False)
    monkeypatch.setattr(deepseek_v4, "get_platform", lambda: hopper)
    os.environ.pop(FP4_EXPERTS, None)
    if value is not None:
        os.environ[FP4_EXPERTS] = value
    record = resolve(v41, None, **ONE_USER)
    assert resolving_view(record).moe_runner_backend == runner


def test_a_gpu_without_the_kernels_is_refused(v41: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "device_isa", lambda: "sm_80")
    assert "not sm_80" in refusal(v41, None, **ONE_USER)


def _documented() -> list[tuple[dict[str, str], list[str]]]:
    """The ``sgl-mega serve`` commands of the page: variables in front, and the server's arguments."""
    page = (Path(__file__).parents[2] / "docs" / "serving-deepseek-v4.1.md").read_text()
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            words = shlex.split(line)
            if "serve" in words:
                start = words.index("sgl-mega")
                environ = dict(word.split("=", 1) for word in words[:start])
                found.append((environ, [word for word in words[start + 2 :] if word != "--master-switch"]))
    return found


@pytest.mark.parametrize("flag", [False, True], ids=["without-the-flag", "with-the-flag"])
@pytest.mark.parametrize("index", [0, 1], ids=["one-user", "reduced-model"])
def test_the_documented_commands_resolve(index: int, flag: bool, v41: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang parses and resolves them; the model's path is the reduced model's, for the weights are not here."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    environ, arguments = _documented()[index]
    for name, value in {**environ, MASTER_SWITCH: "1"}.items():
        monkeypatch.setenv(name, value)
    arguments[arguments.index("--model-path") + 1] = v41
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)  # it would take pytest's handlers away
    load_plugins()
    record = prepare_server_args([*arguments, "--device", "cuda", *(["--enable-nvidia-megakernel"] if flag else [])])
    record.resolve_once()
    settings = resolving_view(record)
    assert (settings.speculative_num_draft_tokens, settings.max_running_requests) == (6, 1)
    assert (settings.tp_size, settings.dsv4_attn_backend) == ((4, 1)[index], "flashmla")
    if flag:
        plan = planning.plan_for(_launch(record), os.environ)
        ours = {"markov"} if index == 1 else set()  # one rank, or four
        assert {entry.name for entry in plan.active} == ours | {
            slot.name for slot in ENGINE_SLOTS if slot.engine_switch in MASTER_VARIABLES
        }
    assert all(os.environ[name] == "1" for name in MASTER_VARIABLES)
