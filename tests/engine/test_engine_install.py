"""SGLang's installation of our specs on loaded models, as a model worker does it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_configs import VOCAB_SIZE, write_draft
from engine_server import resolve
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.kernel_plugins.nvidia import binding
from sglang.srt.models.dspark import GatedMarkovHead, VanillaMarkov
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context

from sgl_mega_plugin.engine import host, planning
from sgl_mega_plugin.engine.draft.sampler import DraftSampler
from sgl_mega_plugin.engine.fold import install as fold
from sgl_mega_plugin.switch import MASTER_SWITCH, SLOTS_VARIABLE

OURS = "sgl_mega_plugin.engine"


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker's process with one rank; what it asks the GPU for is made up."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**30))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    yield
    reset_context()


def _serve(target: str, draft: str, **settings: Any) -> Any:
    """Resolve, then publish as a scheduler process does; returns the settings."""
    record = resolve(target, draft, **settings)
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    return record


def _install(model: torch.nn.Module, architecture: str, *, is_draft: bool) -> Any:
    with get_parallel().override(tp_group=SimpleNamespace(world_size=1)):
        binding.install_megakernel(
            model=model,
            hf_config=SimpleNamespace(architectures=[architecture], model_type="qwen3"),
            capture_tail_hooks=[],
            is_draft=is_draft,
        )
    return binding.built_megakernel(model)


def _draft_model(head: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Module()
    model.markov_head = head.requires_grad_(False)
    return model


def _vanilla() -> torch.nn.Module:
    return VanillaMarkov(vocab_size=VOCAB_SIZE, markov_rank=16).bfloat16()


def _gated() -> torch.nn.Module:
    return GatedMarkovHead(vocab_size=VOCAB_SIZE, markov_rank=16, hidden_size=128).bfloat16()


def _with_half_a_head() -> torch.nn.Module:
    """A head whose two weights differ in dtype, for which the seam has no formula."""
    head = _vanilla()
    head.markov_w2.half()
    return head


def test_the_targets_build_logs_the_plan_and_keeps_its_forward(
    target: str, draft: str, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ[MASTER_SWITCH] = "1"
    _serve(target, draft)
    model = torch.nn.Linear(2, 2)
    with caplog.at_level(logging.INFO):
        built = _install(model, "Qwen3ForCausalLM", is_draft=False)
    assert "forward" not in model.__dict__
    assert (built.widths, built.draft_sampler) == ((), None)
    assert built.summary().startswith("slots on: markov, ")
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(OURS)]
    assert "sgl-mega-plugin: slot 'markov' is on (in the default set)" in ours
    assert f"sgl-mega-plugin: slot 'post_fold' is on (turned on by {MASTER_SWITCH})" in ours
    for name in ("accept_tail", "blockwise_rejection", "context_kv", "step_inputs"):
        assert f"sgl-mega-plugin: slot '{name}' is on (in the default set)" in ours
    assert any("'attn_metadata' is left out: no SGLang server calls" in line for line in ours)
    assert fold.MODULE in sys.modules
    assert sys.modules[fold.MODULE].DSparkWorkerV2.__name__ == "FoldedDSparkWorker"
    assert "NVIDIA megakernel: sgl-mega-plugin target: no step and no draft sampler" in caplog.text


@pytest.mark.parametrize("terms", ["-context_kv", "-accept_tail,-blockwise_rejection", "none,markov"])
def test_without_accept_or_commit_sglangs_worker_stays(terms: str, target: str, draft: str) -> None:
    os.environ[SLOTS_VARIABLE] = terms
    _serve(target, draft)
    _install(torch.nn.Linear(2, 2), "Qwen3ForCausalLM", is_draft=False)
    worker = sys.modules.get(fold.MODULE)
    assert worker is None or worker.DSparkWorkerV2.__name__ == "DSparkWorkerV2"


def test_a_named_slot_of_half_a_fold_stops_the_server(target: str, draft: str) -> None:
    os.environ[SLOTS_VARIABLE] = "none,accept_tail"
    with pytest.raises(ValueError, match="slot 'accept_tail': accept and commit go into the verify graph together"):
        resolve(target, draft)


@pytest.mark.parametrize("head", [_vanilla, _gated], ids=["vanilla", "gated"])
def test_the_drafts_build_offers_the_slot(
    head: Callable[[], torch.nn.Module], target: str, draft: str, caplog: pytest.LogCaptureFixture
) -> None:
    _serve(target, draft)
    model = _draft_model(head())
    with caplog.at_level(logging.INFO):
        built = _install(model, "Qwen3DSparkModel", is_draft=True)
    assert isinstance(built.draft_sampler, DraftSampler)
    assert binding.megakernel_draft_sampler(model) is built.draft_sampler
    assert "NVIDIA megakernel: sgl-mega-plugin draft: draft sampler" in caplog.text


def test_a_default_slot_that_does_not_fit_the_draft_is_left_out(
    target: str, draft: str, caplog: pytest.LogCaptureFixture
) -> None:
    _serve(target, draft)
    with caplog.at_level(logging.INFO):
        built = _install(_draft_model(_with_half_a_head()), "Qwen3DSparkModel", is_draft=True)
    assert built.draft_sampler is None
    assert "slot 'markov' is left out: the Markov weights differ in dtype" in caplog.text


def test_a_named_slot_that_does_not_fit_the_draft_stops_the_server(target: str, draft: str) -> None:
    os.environ[SLOTS_VARIABLE] = "markov"
    _serve(target, draft)
    with pytest.raises(ValueError, match="slot 'markov': the Markov weights differ in dtype"):
        _install(_draft_model(_with_half_a_head()), "Qwen3DSparkModel", is_draft=True)


@pytest.mark.parametrize("terms", ["none", "-markov"])
def test_a_removed_slot_leaves_the_draft_to_sglang(terms: str, target: str, draft: str) -> None:
    os.environ[SLOTS_VARIABLE] = terms
    _serve(target, draft)
    assert _install(_draft_model(_vanilla()), "Qwen3DSparkModel", is_draft=True).draft_sampler is None


def test_without_the_flag_nothing_is_installed(target: str, draft: str) -> None:
    _serve(target, draft, enable_nvidia_megakernel=False)
    assert _install(_draft_model(_vanilla()), "Qwen3DSparkModel", is_draft=True) is None


@pytest.mark.parametrize("settings", [{}, {"tp_size": 2}, {"dtype": "float16"}], ids=["plain", "tp-2", "float16"])
def test_a_worker_makes_the_plan_of_the_launch(settings: dict[str, Any], target: str, tmp_path: Path) -> None:
    os.environ[SLOTS_VARIABLE] = "default,mid_fold,-post_fold"
    draft = write_draft(tmp_path / "d")
    record = _serve(target, draft, **settings)
    at_launch = host.from_settings(resolving_view(record), model_config_of(record).hf_config)
    assert host.from_worker() == at_launch
    assert planning.plan_for(host.from_worker(), os.environ) == planning.plan_for(at_launch, os.environ)
    assert ("markov" in {entry.name for entry in planning.plan_for(at_launch, os.environ).active}) is (not settings)
