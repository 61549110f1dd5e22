"""The target's verify forward by a slot against SGLang's own models: results, capture, and what is left to SGLang."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from engine_decoders import FAMILIES, LAYERS, TOKENS, Served, decoder, one_rank, quantised, served, verify_batch
from engine_forwards import BOUND, row_error, run_forward, serving
from sglang.srt.compilation import torch_compile_decoration
from sglang.srt.kernel_plugins.nvidia import binding
from sglang.srt.layers.quantization import fp8
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config
from sglang.srt.layers.rotary_embedding import base as rotary
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_spec
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_plugin.engine import specs
from sgl_mega_plugin.engine.target.reasons import TARGET_FORWARD
from sgl_mega_plugin.engine.target.verify_forward import VerifyForward
from sgl_mega_plugin.registry import Registry, load_implementation
from sgl_mega_plugin.switch import SLOTS_VARIABLE

NAME = "target_step"


@pytest.fixture(autouse=True)
def worker(target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker's process of a server that names the slot."""
    with serving(NAME, target, draft, monkeypatch):
        yield


def _install(model: torch.nn.Module) -> tuple[Any, list[Any]]:
    """SGLang's installation of the target's spec on a model; what it built, and its capture hooks."""
    hooks: list[Any] = []
    with one_rank():
        binding.install_megakernel(
            model=model,
            hf_config=SimpleNamespace(architectures=["Qwen3ForCausalLM"], model_type="qwen3"),
            capture_tail_hooks=hooks,
            is_draft=False,
        )
    return binding.built_megakernel(model), hooks


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lens", [(20,), (37, 5)], ids=["one request", "two requests"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_sglangs_own_model(family: str, lens: tuple[int, ...], page_size: int) -> None:
    model = decoder(family)
    own = type(model).forward.__get__(model)
    theirs, ours = served(page_size=page_size), served(page_size=page_size)
    batch = verify_batch(theirs, lens, vocab=model.config.vocab_size)
    before = theirs.written()
    wanted = run_forward(own, theirs, batch)
    built, _ = _install(model)
    found = run_forward(model.forward, ours, batch)
    assert len(built.slot.calls) == 1
    assert type(found) is type(wanted)
    for name in ("next_token_logits", "hidden_states"):
        left, right = getattr(found, name), getattr(wanted, name)
        assert (left.dtype, left.shape, left.is_contiguous()) == (right.dtype, right.shape, True), name
        assert row_error(left, right) < BOUND, name
    assert {name for name, value in vars(found).items() if value is not None} == {"next_token_logits", "hidden_states"}
    elsewhere = torch.ones(before[0].shape[1], dtype=torch.bool)
    elsewhere[batch.out_cache_loc] = False
    for kept, mine, old in zip(theirs.written(), ours.written(), before, strict=True):
        for layer in range(LAYERS):
            assert row_error(mine[layer][batch.out_cache_loc], kept[layer][batch.out_cache_loc]) < BOUND, layer
        assert torch.equal(mine[:, elsewhere], old[:, elsewhere])


def test_fp8_keys_and_values_are_those_of_sglangs_own_model() -> None:
    """A value near the middle of two of e4m3 is rounded either way: one step then, an eighth at most, of a few. What
    follows of it comes on top of other roundings.
    """
    fp8 = torch.float8_e4m3fn
    model, theirs, ours = decoder("qwen3"), served(dtype=fp8), served(dtype=fp8)
    batch = verify_batch(theirs, (80, 70), vocab=model.config.vocab_size)
    before = theirs.written()
    wanted = run_forward(type(model).forward.__get__(model), theirs, batch)
    built, _ = _install(model)
    found = run_forward(model.forward, ours, batch)
    assert {keys.dtype for keys in built.slot.calls[0]["out_keys"]} == {fp8}
    assert row_error(found.next_token_logits, wanted.next_token_logits) < 2 * BOUND
    elsewhere = torch.ones(before[0].shape[1], dtype=torch.bool)
    elsewhere[batch.out_cache_loc] = False
    for kept, mine, old in zip(theirs.written(), ours.written(), before, strict=True):
        assert torch.equal(mine[:, elsewhere], old[:, elsewhere])
        first, second = (written[0, batch.out_cache_loc].view(fp8).float() for written in (kept, mine))
        assert (first != second).float().mean() < 0.1
        torch.testing.assert_close(second, first, rtol=0.13, atol=2.0**-6)


def test_the_bound_tells_a_wrong_step_from_a_right_one() -> None:
    model, on = decoder("qwen3"), served()
    batch = verify_batch(on, (20,), vocab=256)
    right = run_forward(type(model).forward.__get__(model), on, batch)
    batch.positions += 1
    wrong = run_forward(type(model).forward.__get__(model), on, batch)
    assert row_error(wrong.next_token_logits, right.next_token_logits) > BOUND


def test_logits_go_into_the_batchs_buffer_where_it_has_one() -> None:
    model, on = decoder("llama"), served()
    wanted = run_forward(type(model).forward.__get__(model), on, verify_batch(on, (9,), vocab=200, buffered=True))
    _install(model)
    batch = verify_batch(on, (9,), vocab=200, buffered=True)
    found = run_forward(model.forward, on, batch)
    assert found.next_token_logits is batch.next_token_logits_buffer
    assert torch.equal(found.next_token_logits, found.next_token_logits.bfloat16().float())  # rounded as SGLang rounds
    assert row_error(found.next_token_logits, wanted.next_token_logits) < BOUND


@pytest.mark.parametrize("taps", [(1,), (1, 0), (0, LAYERS - 1)], ids=["one", "out of order", "behind the last"])
def test_tapped_hidden_states_are_packed_as_sglang_packs_them(taps: tuple[int, ...]) -> None:
    model, on = decoder("qwen3", taps=taps), served()
    batch = verify_batch(on, (20,), vocab=256)
    wanted = run_forward(type(model).forward.__get__(model), on, batch).hidden_states
    _install(model)
    found = run_forward(model.forward, on, batch).hidden_states
    assert found.shape == wanted.shape
    assert row_error(found, wanted) < BOUND


def test_a_batch_that_wants_no_hidden_states_gets_none() -> None:
    model, on = decoder("qwen3"), served()
    built, _ = _install(model)
    batch = verify_batch(on, (20,), vocab=256)
    batch.capture_hidden_mode = CaptureHiddenMode.NULL
    assert run_forward(model.forward, on, batch).hidden_states is None
    assert built.slot.calls[0]["out_tapped"] is None


def test_padding_rows_of_a_graph_write_nothing_and_change_nothing() -> None:
    model, on, alone = decoder("qwen3"), served(), served()
    _install(model)
    wanted = run_forward(model.forward, alone, verify_batch(alone, (20,), vocab=256))
    found = run_forward(model.forward, on, verify_batch(on, (20, 0), vocab=256))
    assert torch.equal(found.next_token_logits[:TOKENS], wanted.next_token_logits)
    for mine, theirs in zip(on.written(), alone.written(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_slot_gets_the_models_own_memory(family: str) -> None:
    model, on = decoder(family), served()
    built, _ = _install(model)
    run_forward(model.forward, on, verify_batch(on, (20,), vocab=model.config.vocab_size))
    (call,) = built.slot.calls
    layers = model.model.layers
    parts = {
        "input_norms": [layer.input_layernorm for layer in layers],
        "qkv_weights": [layer.self_attn.qkv_proj for layer in layers],
        "output_weights": [layer.self_attn.o_proj for layer in layers],
        "mlp_norms": [layer.post_attention_layernorm for layer in layers],
        "gate_up_weights": [layer.mlp.gate_up_proj for layer in layers],
        "down_weights": [layer.mlp.down_proj for layer in layers],
    }
    for name, modules in parts.items():
        assert [weight.data_ptr() for weight in call[name]] == [part.weight.data_ptr() for part in modules], name
    assert (call["qkv_biases"] is None, call["q_norms"] is None) == (family != "qwen2", family != "qwen3")
    assert call["embedding"].data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert call["lm_head_weight"].data_ptr() == model.lm_head.weight.data_ptr()
    assert call["lm_head_weight"].shape[0] == model.config.vocab_size  # without SGLang's padding
    assert call["cos_sin"].dtype == torch.float32
    assert [keys.data_ptr() for keys in call["out_keys"]] == [keys.data_ptr() for keys in on.pool.k_buffer]
    assert call["req_to_token"].data_ptr() == on.table.data_ptr()


def _by_kernel(model: Any, on: Served, batch: Any) -> Any:
    """A forward of one request by the slot's kernel on a CPU."""
    setup = SlotSetup(backend=Backend.INTERPRETER, device="cpu", max_batch=1, gamma=TOKENS - 1, vocab_size=256)
    kernel = load_implementation(Registry.discover().get(NAME))(setup)
    built = VerifyForward(model=model, slot=kernel, slot_name=NAME, tokens=TOKENS, requests=1)
    view = SimpleNamespace(kv_pool=SimpleNamespace(pool=on.pool))
    with one_rank(), on.context(batch):
        step = built.plan(batch.input_ids, batch)
        assert step is not None
        return built.forward(SimpleNamespace(rows=step.rows, view=view), None, batch.input_ids, batch.positions, batch)


@pytest.mark.slow
def test_the_kernel_itself_runs_on_sglangs_model() -> None:
    """The slot's own source on a CPU, its plan and its binding included, on what SGLang hands over."""
    model, on, own = decoder("qwen3"), served(page_size=16), served(page_size=16)
    batch = verify_batch(on, (20,), vocab=256)
    wanted = run_forward(type(model).forward.__get__(model), own, batch)
    found = _by_kernel(model, on, batch)
    assert row_error(found.next_token_logits, wanted.next_token_logits) < BOUND
    assert row_error(found.hidden_states, wanted.hidden_states) < BOUND
    for mine, theirs in zip(on.written(), own.written(), strict=True):
        assert row_error(mine[:, batch.out_cache_loc], theirs[:, batch.out_cache_loc]) < BOUND


def test_an_error_of_the_slot_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, on = decoder("qwen3"), served()
    built, _ = _install(model)

    def fail(**arguments: Any) -> None:
        raise RuntimeError("the driver refused the launch")

    monkeypatch.setattr(built, "slot", fail)
    with pytest.raises(RuntimeError, match="the driver refused the launch"):
        run_forward(model.forward, on, verify_batch(on, (20,), vocab=256))


# -- fp8 weights -------------------------------------------------------------------------------------------------------


def _compressed(**weights: Any) -> CompressedTensorsConfig:
    """The config of a checkpoint of llm-compressor: dynamic fp8 activations, fp8 weights with such scales."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"dynamic": False} | weights,
        "input_activations": common | {"dynamic": True, "strategy": "token"},
    }
    if weights["strategy"] == "block":
        group["input_activations"] |= {"strategy": "group", "group_size": 128}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return CompressedTensorsConfig.from_config(settings | {"ignore": ["lm_head"], "quantization_status": "compressed"})


#: How SGLang comes to fp8 matrices, and the numbers of axes of the seam's scales then.
FP8: dict[str, tuple[Callable[[], Any], int]] = {
    "blocks": (lambda: Fp8Config(True, "dynamic", weight_block_size=[128, 128]), 2),
    "a scale a matrix of the checkpoint": (lambda: Fp8Config(True, "dynamic"), 1),
    "quantised at load, by tensor": (lambda: Fp8Config(False, "dynamic"), 1),
    "quantised at load, by row": (lambda: Fp8Config(False, "dynamic"), 1),
    "w8a8_fp8": (lambda: W8A8Fp8Config(True), 1),
    "compressed-tensors, by row": (lambda: _compressed(strategy="channel"), 1),
    "compressed-tensors, blocks": (lambda: _compressed(strategy="block", block_structure=[128, 128]), 2),
}


def _fp8_model(how: str, family: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A model whose layers SGLang's own methods left as on an H200, and its bf16 twin.

    Without a GPU two answers are made up: the chip, and that CUTLASS multiplies fp8, on which scales of rows depend.
    The kernel that quantises rows at load is torch here.
    """
    if "tensor" not in how or "compressed" in how:
        monkeypatch.setattr(fp8, "cutlass_fp8_supported", lambda: True)
    monkeypatch.setattr(fp8, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def by_row(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
        assert group == weight.shape[1]
        scales = weight.float().abs().amax(1, keepdim=True) / 448
        return (weight.float() / scales).to(torch.float8_e4m3fn), scales

    monkeypatch.setattr(fp8, "per_token_group_quant_fp8", by_row)
    return quantised(family, FP8[how][0]())


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("how", FP8)
def test_an_fp8_model_is_read_as_sglang_keeps_it(how: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against SGLang's bf16 model of the same weights: its own fp8 kernels, which quantise activations, need a GPU."""
    model, twin = _fp8_model(how, family, monkeypatch)
    theirs, ours = served(), served()
    batch = verify_batch(theirs, (20,), vocab=model.config.vocab_size)
    wanted = run_forward(type(twin).forward.__get__(twin), theirs, batch)
    built, _ = _install(model)
    found = run_forward(model.forward, ours, batch)
    assert row_error(found.next_token_logits, wanted.next_token_logits) < BOUND
    assert row_error(found.hidden_states, wanted.hidden_states) < BOUND
    (call,) = built.slot.calls
    for index, layer in enumerate(model.model.layers):
        parts = {
            "qkv": layer.self_attn.qkv_proj,
            "output": layer.self_attn.o_proj,
            "gate_up": layer.mlp.gate_up_proj,
            "down": layer.mlp.down_proj,
        }
        for name, part in parts.items():
            weight, scales = call[f"{name}_weights"][index], call[f"{name}_scales"][index]
            assert weight.data_ptr() == part.weight.data_ptr()
            assert (weight.dtype, weight.is_contiguous()) == (torch.float8_e4m3fn, True)
            assert (scales.dtype, scales.dim(), scales.is_contiguous()) == (torch.float32, FP8[how][1], True)


def _unquantized(model: Any) -> None:
    linear = _first(model).o_proj
    linear.quant_method = UnquantizedLinearMethod()
    linear.weight = torch.nn.Parameter(linear.weight.bfloat16(), requires_grad=False)


def _method(model: Any) -> Any:
    return _first(model).o_proj.quant_method


def _rounded(model: Any) -> None:
    _first(model).o_proj.weight_scale_inv.format_ue8m0 = True


#: What other backends of SGLang make of blocks, and checkpoints of other kinds; one layer of three has it.
FP8_MISFITS: dict[str, tuple[Any, str]] = {
    "marlin": (lambda m: setattr(_method(m), "use_marlin", True), "o_proj is quantized: Marlin has its weights"),
    "mxfp8": (lambda m: setattr(_method(m), "use_mxfp8", True), "o_proj is quantized: its weights are MXFP8"),
    "as mxfp8": (lambda m: setattr(_method(m), "block_fp8_as_mxfp8", True), "it is served as MXFP8"),
    "amx": (lambda m: setattr(_first(m).o_proj, "use_intel_amx_backend", True), "packed for a CPU's AMX"),
    "aiter": (lambda m: setattr(_first(m).o_proj, "aiter_bpreshuffled", True), "AITER has its weights"),
    "ue8m0": (_rounded, "o_proj's scales are rounded to powers of two for DeepGEMM"),
    "blocks": (
        lambda m: setattr(_method(m), "weight_block_size", [32, 32]),
        "blocks of [32, 32] weights share a scale",
    ),
    "scales": (
        lambda m: setattr(_first(m).o_proj.weight_scale_inv, "data", torch.ones(2, 2)),
        "o_proj's scales are (2, 2), and its blocks (1, 2) (layer 1)",
    ),
    "scales' dtype": (
        lambda m: setattr(_first(m).o_proj.weight_scale_inv, "data", torch.ones(1, 2, dtype=torch.bfloat16)),
        "o_proj's scale is torch.bfloat16, not torch.float32",
    ),
    "no scales": (lambda m: setattr(_first(m).o_proj, "weight_scale_inv", None), "is quantized and has no scales"),
    "e5m2": (
        lambda m: setattr(_first(m).o_proj.weight, "data", _first(m).o_proj.weight.to(torch.float8_e5m2)),
        "o_proj's weight is torch.float8_e5m2, not torch.float8_e4m3fn",
    ),
    "one in bf16": (_unquantized, "matrices are bf16 and fp8 with a scale a block, and the seam has one kind"),
}


@pytest.mark.parametrize("name", FP8_MISFITS)
def test_an_fp8_model_that_another_backend_laid_out_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, words = FP8_MISFITS[name]
    model, _ = _fp8_model("blocks", "qwen3", monkeypatch)
    change(model)
    with pytest.raises(ValueError, match="cannot run this setup") as caught:
        _install(model)
    assert words in str(caught.value)


def test_a_number_of_scales_that_is_neither_one_nor_one_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = _fp8_model("a scale a matrix of the checkpoint", "qwen3", monkeypatch)
    _first(model).o_proj.weight_scale.data = torch.ones(3)
    with pytest.raises(ValueError, match="o_proj has 3 scales for 128 rows"):
        _install(model)


def test_a_scheme_of_compressed_tensors_that_is_not_fp8_by_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = _fp8_model("compressed-tensors, by row", "qwen3", monkeypatch)
    _first(model).o_proj.scheme = SimpleNamespace()
    with pytest.raises(ValueError, match="o_proj is quantized: its scheme is SimpleNamespace"):
        _install(model)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["blocks", "a scale a matrix of the checkpoint"])
def test_the_kernel_itself_runs_on_sglangs_fp8_model(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = _fp8_model(how, "qwen3", monkeypatch)
    on, own = served(), served()
    batch = verify_batch(on, (20,), vocab=256)
    wanted = run_forward(type(twin).forward.__get__(twin), own, batch)
    found = _by_kernel(model, on, batch)
    assert row_error(found.next_token_logits, wanted.next_token_logits) < BOUND
    assert row_error(found.hidden_states, wanted.hidden_states) < BOUND


# -- capture -----------------------------------------------------------------------------------------------------------


def test_the_capture_of_a_verify_graph_records_the_slot_before_the_tail_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's own capture of one shape, with a backend that runs what a capture would record."""
    model, on = decoder("qwen3"), served()
    built, hooks = _install(model)
    recorded: list[tuple[str, int]] = []
    seen: list[Any] = []

    def tail(runner: Any, out: Any, batch: Any, rows: int) -> None:  # where the fold's epilogue hangs
        recorded.append(("tail", len(built.slot.calls)))
        seen.append((out, batch, rows))

    class Capture:
        def capture_one(self, key: Any, run: Any, **kwargs: Any) -> None:
            for _ in range(2):
                run()  # SGLang's warm-ups, in which the slot builds
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            run()
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    runner = MagicMock(
        captured_req_width=TOKENS,
        ragged_verify_mode=False,
        backend=Capture(),
        pp_size=1,
        dllm_uses_input_embeds=False,
        capture_bs=[1, 2],
    )
    runner.model_runner.capture_head_hooks = []
    runner.model_runner.capture_tail_hooks = [*hooks, tail]
    runner.model_runner.canary_manager = None
    runner.model_runner.is_draft_worker = False
    runner.model_runner.spec_algorithm.is_dflash_family = lambda: True
    monkeypatch.setattr(on.backend, "init_forward_metadata_out_graph", lambda *a, **k: None, raising=False)
    for requests in (2, 1):
        batch = verify_batch(on, (20, 5)[:requests], vocab=256, buffered=True)
        runner.capture_prepare = lambda *a, batch=batch, **k: (batch, on.backend, None)
        with (
            one_rank(),
            torch_compile_decoration.patch_model(model, False, num_tokens=TOKENS, tp_group=None) as forward,
        ):
            DecodeCudaGraphRunner.capture_one_shape(runner, requests, forward)
        out, hooked, rows = seen[-1]
        assert (hooked is batch, rows) == (True, requests * TOKENS)
        assert out.next_token_logits is batch.next_token_logits_buffer
        assert out.hidden_states.shape == (rows, 2 * model.config.hidden_size)
    assert recorded == [("tail", calls) for calls in (1, 2, 3, 4, 5, 6)]
    (check,) = hooks
    assert check.is_done
    assert {size: step.rows for size, step in check.dispatch.captured.items()} == {1: TOKENS, 2: 2 * TOKENS}


def test_the_widths_are_whole_requests_of_sglangs_verify_step() -> None:
    built, _ = _install(decoder("qwen3"))
    assert get_spec().speculative_num_draft_tokens == TOKENS
    assert built.widths == (8, 16, 24, 32)
    assert built.summary() == "slot 'target_step' runs target verify of 1 to 4 requests, 8 rows each"
    assert (built.slot.setup.gamma, built.slot.setup.max_batch, built.slot.setup.vocab_size) == (7, 4, 256)
    assert (built.slot.setup.backend, built.slot.setup.device) == (Backend.KERNEL, "cpu")


# -- what a step leaves to SGLang --------------------------------------------------------------------------------------


def _declined(batch: Any, **changes: Any) -> Any:
    for name, value in changes.items():
        setattr(batch.spec_info if hasattr(batch.spec_info, name) else batch, name, value)
    return batch


@pytest.mark.parametrize(
    "changes",
    [
        {"forward_mode": ForwardMode.EXTEND},
        {"forward_mode": ForwardMode.DECODE},
        {"forward_mode": ForwardMode.IDLE},
        {"batch_size": 0},
        {"batch_size": 5, "input_ids": torch.zeros(5 * TOKENS, dtype=torch.int64)},
        {"input_ids": torch.zeros(TOKENS + 1, dtype=torch.int64)},
        {"draft_token_num": TOKENS - 1},
        {"topk": 2},
        {"custom_mask": torch.ones(1, dtype=torch.bool)},
        {"ragged_verify_layout": object()},
        {"replace_embeds": torch.zeros(1)},
        {"spec_info": None},
    ],
    ids=lambda changes: next(iter(changes)) + "=" + str(next(iter(changes.values())))[:12],
)
def test_what_the_slot_does_not_cover_stays_sglangs(changes: dict[str, Any]) -> None:
    built, _ = _install(decoder("qwen3"))
    batch = verify_batch(served(), (20,), vocab=256)
    assert built.plan(batch.input_ids, batch, pp_proxy_tensors=None).rows == TOKENS
    batch = _declined(batch, **changes)
    assert built.plan(batch.input_ids, batch) is None


@pytest.mark.parametrize("extra", [{"input_embeds": torch.zeros(1)}, {"get_embedding": True}])
def test_other_inputs_and_results_stay_sglangs(extra: dict[str, Any]) -> None:
    built, _ = _install(decoder("qwen3"))
    batch = verify_batch(served(), (20,), vocab=256)
    assert built.plan(batch.input_ids, batch, **extra) is None


# -- models and pools that do not fit ----------------------------------------------------------------------------------


def _first(model: Any) -> Any:
    return model.model.layers[1].self_attn


def _bias() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16), requires_grad=False)


class Wrapped(torch.nn.Module):
    """What LoRA makes of a module."""


MISFITS: dict[str, tuple[Any, str]] = {
    "another model": (lambda m: setattr(m, "model", torch.nn.Linear(2, 2)), "only models with the parts and forward"),
    "another layer": (lambda m: setattr(m.model.layers[1], "mlp", Wrapped()), "layer 1 is Qwen3DecoderLayer or has"),
    "wrapped": (lambda m: setattr(_first(m), "o_proj", Wrapped()), "o_proj is a Wrapped, not a RowParallelLinear"),
    "ranks": (
        lambda m: setattr(_first(m).qkv_proj, "output_size", 1024),
        "qkv_proj is split over ranks: (512, 128) of (1024, 128) are here (layer 1)",
    ),
    "quantized": (lambda m: setattr(_first(m).qkv_proj, "quant_method", object()), "qkv_proj is quantized"),
    "bias": (lambda m: _first(m).o_proj.register_parameter("bias", _bias()), "o_proj has a bias"),
    "some biases": (
        lambda m: _first(m).qkv_proj.register_parameter("bias", _bias()),
        "some layers have a bias",
    ),
    "dtype": (lambda m: m.half(), "qkv_proj's weight is torch.float16, not torch.bfloat16 (every layer)"),
    "strides": (
        lambda m: setattr(_first(m).qkv_proj.weight, "data", torch.zeros(128, 512, dtype=torch.bfloat16).T),
        "qkv_proj's weight has strides (1, 512): it is not contiguous",
    ),
    "norm": (lambda m: setattr(_first(m), "q_norm", torch.nn.Identity()), "q_norm is a Identity, not an RMSNorm"),
    "norm formula": (lambda m: setattr(_first(m).q_norm, "cast_x_before_out_mul", True), "another formula"),
    "eps": (lambda m: setattr(m.model.norm, "variance_epsilon", 1e-3), "the seam has one for all (every layer)"),
    "activation": (lambda m: setattr(m.model.layers[1].mlp, "act_fn", torch.nn.GELU()), "the MLP's activation is GELU"),
    "window": (lambda m: setattr(_first(m).attn, "sliding_window_size", 64), "a sliding window of 64 (layer 1)"),
    "score cap": (lambda m: setattr(_first(m).attn, "logit_cap", 30.0), "attention scores are capped at 30.0"),
    "score scale": (lambda m: setattr(_first(m).attn, "scaling", 1.0), "attention scores are scaled by 1.0"),
    "value size": (lambda m: setattr(_first(m).attn, "v_head_dim", 32), "values have head size 32, keys 64"),
    "cross": (lambda m: setattr(_first(m).attn, "is_cross_attention", True), "causal self-attention"),
    "temperature": (lambda m: setattr(_first(m).attn, "xai_temperature_len", 8), "another way than by rotation"),
    "kv scale": (lambda m: setattr(_first(m).attn, "k_scale", torch.full((1,), 2.0)), "scaled for a quantized cache"),
    "kv method": (lambda m: setattr(_first(m).attn, "quant_method", Wrapped()), "the method is Wrapped"),
    "cache layer": (lambda m: setattr(_first(m).attn, "layer_id", 7), "those of layer 7 of the cache"),
    "rotary kind": (lambda m: setattr(_first(m), "rotary_emb", Wrapped()), "positions are rotated by Wrapped"),
    "rotary style": (lambda m: setattr(_first(m).rotary_emb, "is_neox_style", False), "pairs neighbours"),
    "partial rotary": (lambda m: setattr(_first(m).rotary_emb, "rotary_dim", 32), "32 of a head's 64 values"),
    "rotary tables": (
        lambda m: setattr(_first(m), "rotary_emb", rotary.RotaryEmbedding(64, 64, 8, 10000, True, torch.bfloat16)),
        "layers differ in their rotary embedding (layer 1)",
    ),
    "rotary dtype": (
        lambda m: setattr(_first(m).rotary_emb, "cos_sin_cache", _first(m).rotary_emb.cos_sin_cache.bfloat16()),
        "the rotary embedding's table is torch.bfloat16, not torch.float32",
    ),
    "head ranks": (lambda m: setattr(m.lm_head, "tp_size", 2), "is split over 2 ranks"),
    "head quantized": (lambda m: setattr(m.lm_head, "quant_method", object()), "is quantized"),
    "head kind": (lambda m: setattr(m, "lm_head", Wrapped()), "the LM head is a Wrapped"),
    "added tokens": (lambda m: setattr(m.lm_head, "num_embeddings", 260), "4 tokens added behind"),
    "vocabulary": (lambda m: setattr(m.logits_processor, "vocab_size", 250), "has 256 tokens, the logits 250"),
    "logit scale": (lambda m: setattr(m.logits_processor, "logit_scale", 0.5), "logits are scaled"),
    "logit cap": (lambda m: setattr(m.logits_processor, "final_logit_softcapping", 30.0), "logits are soft-capped"),
    "fp32 head": (lambda m: setattr(m.logits_processor, "use_fp32_lm_head", True), "computed or kept in fp32"),
    "gathered": (
        lambda m: setattr(m.logits_processor, "do_tensor_parallel_all_gather", True),
        "logits are gathered from ranks",
    ),
    "full logits": (lambda m: setattr(m.logits_processor, "return_full_logits", True), "every position"),
    "last hidden": (lambda m: setattr(m.logits_processor, "keep_last_hidden_states", True), "returned besides"),
    "on policy": (lambda m: setattr(m.logits_processor, "rl_on_policy_target", "fsdp"), "trainer's arithmetic"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_named_slot_stops_the_server_on_a_model_that_does_not_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, words = MISFITS[name]
    from sglang.srt.layers.rotary_embedding import factory

    monkeypatch.setattr(factory, "_ROPE_DICT", {})  # SGLang keeps tables for models to come
    model = decoder("qwen3")
    change(model)
    with pytest.raises(ValueError, match="cannot run this setup") as caught:
        _install(model)
    (line, *_) = [line for line in str(caught.value).splitlines() if words in line] or [str(caught.value)]
    assert words in line
    assert "slot 'target_step': " in line


def test_every_reason_is_told_at_once() -> None:
    model = decoder("qwen3")
    model.logits_processor.logit_scale = 2.0
    _first(model).attn.logit_cap = 5.0
    with pytest.raises(ValueError, match=r"(?s)capped at 5.0 \(layer 1\).*logits are scaled"):
        _install(model)


def test_a_slot_that_nobody_named_is_left_out_of_a_model_that_does_not_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    os.environ[SLOTS_VARIABLE] = "none,@target"
    model = decoder("qwen3")
    model.logits_processor.logit_scale = 2.0
    with caplog.at_level("INFO"):
        built, hooks = _install(model)
    assert (built.widths, hooks) == ((), [])
    assert "slot 'target_step' is left out: logits are scaled" in caplog.text
    assert "forward" not in model.__dict__


def test_a_build_says_what_is_covered(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        _install(decoder("qwen3"))
    assert "target verify of 1 to 4 requests, 8 rows each; SGLang's: larger batches, prefill, idle" in caplog.text
    assert "tolerance numerics" in caplog.text


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("kv_cache_layout", "hnd", "layout is 'hnd'"),
        ("dtype", torch.float8_e4m3fn, "keeps torch.float8_e4m3fn"),
        ("store_dtype", torch.uint8, "as torch.uint8"),
        ("quant_method", object(), "not torch.bfloat16"),
    ],
)
def test_a_pool_that_does_not_fit_stops_the_first_forward(attribute: str, value: Any, words: str) -> None:
    model, on = decoder("qwen3"), served()
    _install(model)
    setattr(on.pool, attribute, value)
    with pytest.raises(RuntimeError, match="slot 'target_step' cannot run here") as caught:
        run_forward(model.forward, on, verify_batch(on, (20,), vocab=256))
    assert words in str(caught.value)


def test_another_kind_of_pool_virtual_slots_hooks_and_missing_taps_stop_the_first_forward() -> None:
    model, on = decoder("qwen3"), served()
    _install(model)
    batch = verify_batch(on, (20,), vocab=256)
    model.model.layers[0].register_forward_hook(lambda *_: None)
    on.backend.kv_index_translator = SimpleNamespace(reads_are_translated=True)
    with pytest.raises(RuntimeError, match=r"virtual slots.*; forward hooks would not run: those of model.layers.0"):
        run_forward(model.forward, on, batch)
    model.model.layers[0]._forward_hooks.clear()
    on.backend.kv_index_translator.reads_are_translated = False
    model.model.layers_to_capture = []
    with pytest.raises(RuntimeError, match="no layer is tapped"):
        run_forward(model.forward, on, batch)
    on.backend.token_to_kv_pool = SimpleNamespace()
    with pytest.raises(RuntimeError, match="the KV pool is a SimpleNamespace"):
        run_forward(model.forward, on, batch)


def test_every_slot_of_the_seam_keeps_the_tolerance_that_the_spec_states() -> None:
    slots = [slot for slot in Registry.discover().slots() if slot.seam == TARGET_FORWARD]
    assert NAME in {slot.name for slot in slots}
    assert all(slot.numerics.bound <= specs.FORWARD_TOLERANCE for slot in slots)
    assert specs.TARGET.numerics.tolerances == {TARGET_FORWARD: specs.FORWARD_TOLERANCE}
