"""When a server's settings let a slot run the target's forward: closed as shipped, and its reasons once it is open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_configs import write_target
from engine_server import refusal, resolve

from sgl_mega_plugin.contract import Feature, Host
from sgl_mega_plugin.engine import families
from sgl_mega_plugin.engine.host import Launch
from sgl_mega_plugin.engine.target import model_checks
from sgl_mega_plugin.engine.target.reasons import ARCHITECTURES, target_forward_reasons
from sgl_mega_plugin.switch import SLOTS_VARIABLE


@pytest.fixture
def named() -> None:
    os.environ[SLOTS_VARIABLE] = "default,target_step"


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_named_it_runs_beside_the_fold(kv: str, target: str, draft: str) -> None:
    resolve(target, draft, max_running_requests=4, kv_cache_dtype=kv)


@pytest.mark.usefixtures("named")
def test_a_server_of_more_users_than_the_slot_serves_is_accepted(target: str, draft: str) -> None:
    resolve(target, draft, max_running_requests=16)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp_size": 2}, "tensor parallelism is in use, and a rank has a part of each matrix only"),
        ({"dtype": "float16"}, "dtype 'float16' is in use; the seam's weights are 'bfloat16'"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype 'fp8_e5m2' is in use; the seam's are bf16 or fp8_e4m3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_the_seam_does_not_have_refuse_a_named_slot(
    settings: dict[str, Any], words: str, target: str, draft: str
) -> None:
    message = refusal(target, draft, **({"max_running_requests": 4} | settings))
    assert f"slot 'target_step': {words}" in message


@pytest.mark.usefixtures("named")
def test_a_mixture_of_experts_is_refused_before_weights_load(tmp_path: Path, draft: str) -> None:
    message = refusal(write_target(tmp_path / "moe", "Qwen3MoeForCausalLM"), draft, max_running_requests=4)
    assert "slot 'target_step': target architecture ['Qwen3MoeForCausalLM'] is none of" in message


def _launch(**changes: Any) -> Launch:
    host = Host(runtime="sglang", isa="sm_90", backend="kernel", dtype="bfloat16", features=changes.pop("features", ()))
    settings: dict[str, Any] = {"target_architectures": ("Qwen3ForCausalLM",)} | changes
    return Launch(host, "DSPARK", True, True, False, **settings)


def test_a_plain_server_has_no_reasons() -> None:
    assert target_forward_reasons(_launch()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"features": {Feature.DP_ATTENTION}}, "data-parallel attention is in use"),
        ({"features": {Feature.PIPELINE_PARALLEL}}, "pipeline parallelism is in use"),
        ({"features": {Feature.RAGGED_VERIFY}}, "ragged verify is in use"),
        ({"features": {Feature.LORA}}, "LoRA is in use"),
        ({"unified_memory": True}, "virtual slots"),
    ],
    ids=["dp-attention", "pipeline", "ragged", "lora", "unified-memory"],
)
def test_each_setting_has_a_reason_of_its_own(changes: dict[str, Any], words: str) -> None:
    (reason,) = target_forward_reasons(_launch(**changes))
    assert words in reason


#: In a process of its own, left at once: a Python that has imported all of SGLang's models may not end well.
_FORWARDS = """
import json, os, sys
from sglang.srt.models.registry import ModelRegistry
found = {name: ModelRegistry.resolve_model_cls(name)[0].forward for name in sys.argv[1:]}
print(json.dumps({name: f"{forward.__module__}.{forward.__qualname__}" for name, forward in found.items()}), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def forwards() -> dict[str, str]:
    """The function that each architecture's model runs as its forward, by its full name."""
    command = [sys.executable, "-c", _FORWARDS, *ARCHITECTURES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_named_is_a_dense_decoder_of_sglang(architecture: str, forwards: dict[str, str]) -> None:
    known = [family.causal.forward for family in model_checks._families()]
    assert forwards[architecture] in {f"{forward.__module__}.{forward.__qualname__}" for forward in known}
    # SGLang has no place in Qwen2's model where a DSpark draft reads its layers.
    assert (architecture in families.TARGETS) == (architecture != "Qwen2ForCausalLM")
