"""The draft's forward over its block by a slot against SGLang's own draft, and what is left to SGLang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_decoders import (
    DRAFTS,
    LAYERS,
    TOKENS,
    Served,
    decoder,
    draft_of,
    one_rank,
    quantised_draft,
    served,
    verify_batch,
)
from engine_forwards import BOUND, row_error, run_forward, serving
from engine_server import refusal
from sglang.srt.kernel_plugins.nvidia import binding
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import reset_context

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_plugin.engine import specs
from sgl_mega_plugin.engine.draft.block_forward import BlockForward
from sgl_mega_plugin.engine.draft.reasons import DRAFT_FORWARD
from sgl_mega_plugin.engine.draft.sampler import DraftSampler
from sgl_mega_plugin.registry import Registry, load_implementation
from sgl_mega_plugin.switch import SLOTS_VARIABLE

NAME, GAMMA = "draft_step", TOKENS - 1


@pytest.fixture(autouse=True)
def worker(target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker's process of a server that names the slot."""
    with serving(NAME, target, draft, monkeypatch):
        yield


@pytest.fixture
def model() -> Any:
    return draft_of(decoder("qwen3"))


def _install(model: torch.nn.Module) -> Any:
    """SGLang's installation of the draft's spec on a model; what it built."""
    with one_rank():
        binding.install_megakernel(
            model=model,
            hf_config=SimpleNamespace(architectures=["Qwen3DSparkModel"], model_type="qwen3"),
            capture_tail_hooks=[],
            is_draft=True,
        )
    return binding.built_megakernel(model)


def _block(on: Served, lens: tuple[int, ...], rows: int = GAMMA) -> Any:
    """Anchors and mask tokens behind these committed tokens."""
    batch = verify_batch(on, lens, vocab=256, tokens=rows)
    batch.input_ids.view(len(lens), rows)[:, 1:] = 255
    return batch


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lens", [(20,), (37, 5)], ids=["one request", "two requests"])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_block_is_that_of_sglangs_own_draft(name: str, lens: tuple[int, ...]) -> None:
    model = draft_of(decoder("qwen3"), name)
    own = type(model).forward.__get__(model)
    theirs, ours = served(), served()
    batch, before = _block(theirs, lens), theirs.written()
    wanted = run_forward(own, theirs, batch)
    built = _install(model)
    found = run_forward(model.forward, ours, batch)
    assert len(built.slot.calls) == 1
    assert (type(found), found.next_token_logits) == (type(wanted), None)
    left, right = found.hidden_states, wanted.hidden_states
    assert (left.dtype, left.shape, left.is_contiguous()) == (right.dtype, right.shape, True)
    assert row_error(left, right) < BOUND
    elsewhere = torch.ones(before[0].shape[1], dtype=torch.bool)
    elsewhere[batch.out_cache_loc] = False
    for kept, mine, old in zip(theirs.written(), ours.written(), before, strict=True):
        for layer in range(LAYERS):
            assert row_error(mine[layer][batch.out_cache_loc], kept[layer][batch.out_cache_loc]) < BOUND, layer
        assert torch.equal(mine[:, elsewhere], old[:, elsewhere])


def test_the_bound_tells_rows_that_see_each_other_from_rows_that_do_not(model: Any) -> None:
    on = served()
    batch = _block(on, (2,))
    right = run_forward(type(model).forward.__get__(model), on, batch)
    for layer in model.layers:
        layer.self_attn.attn.attn_type = decoder("qwen3").model.layers[0].self_attn.attn.attn_type
    wrong = run_forward(type(model).forward.__get__(model), on, batch)
    assert row_error(wrong.hidden_states, right.hidden_states) > BOUND


def test_the_slot_gets_the_models_own_memory(model: Any) -> None:
    on, built = served(), _install(model)
    run_forward(model.forward, on, _block(on, (20,)))
    (call,) = built.slot.calls
    parts = {
        "input_norms": [layer.input_layernorm for layer in model.layers],
        "qkv_weights": [layer.self_attn.qkv_proj for layer in model.layers],
        "output_weights": [layer.self_attn.o_proj for layer in model.layers],
        "mlp_norms": [layer.post_attention_layernorm for layer in model.layers],
        "gate_up_weights": [layer.mlp.gate_up_proj for layer in model.layers],
        "down_weights": [layer.mlp.down_proj for layer in model.layers],
    }
    for name, modules in parts.items():
        assert [weight.data_ptr() for weight in call[name]] == [part.weight.data_ptr() for part in modules], name
    assert call["embedding"].data_ptr() == model.embed_tokens.weight.data_ptr()
    assert call["final_norm"].data_ptr() == model.norm.weight.data_ptr()
    assert [keys.data_ptr() for keys in call["out_keys"]] == [keys.data_ptr() for keys in on.pool.k_buffer]
    assert call["req_to_token"].data_ptr() == on.table.data_ptr()


def test_an_fp8_draft_is_read_as_sglang_keeps_it() -> None:
    """Blocks of 128 x 128 share a scale; against SGLang's bf16 draft of the same weights."""
    model, twin = quantised_draft(
        Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    )
    theirs, ours = served(), served()
    batch = _block(theirs, (20,))
    wanted = run_forward(type(twin).forward.__get__(twin), theirs, batch)
    built = _install(model)
    found = run_forward(model.forward, ours, batch)
    assert row_error(found.hidden_states, wanted.hidden_states) < BOUND
    (call,) = built.slot.calls
    assert call["down_weights"][0].dtype == torch.float8_e4m3fn
    assert call["down_scales"][0].shape == (1, 2)


@pytest.mark.slow
def test_the_kernel_itself_runs_on_sglangs_draft(model: Any) -> None:
    """The slot's own source on a CPU, its plan and its binding included, on what SGLang hands over."""
    on, own = served(), served()
    batch = _block(on, (20,))
    wanted = run_forward(type(model).forward.__get__(model), own, batch)
    setup = SlotSetup(backend=Backend.INTERPRETER, device="cpu", max_batch=1, gamma=GAMMA, vocab_size=256)
    kernel = load_implementation(Registry.discover().get(NAME))(setup)
    built = BlockForward(model, kernel, NAME, tokens=GAMMA, requests=1, draft_sampler=None)
    view = SimpleNamespace(kv_pool=SimpleNamespace(pool=on.pool))
    with one_rank(), on.context(batch):
        step = built.plan(batch.input_ids, batch)
        assert step is not None
        found = built.forward(SimpleNamespace(rows=step.rows, view=view), None, batch.input_ids, batch.positions, batch)
    assert row_error(found.hidden_states, wanted.hidden_states) < BOUND


# -- builds ------------------------------------------------------------------------------------------------------------


def test_a_block_has_a_row_for_each_token_that_is_drafted(model: Any) -> None:
    built = _install(model)
    assert built.widths == (7, 14, 21, 28)
    assert built.summary() == "slot 'draft_step' runs blocks of 1 to 4 requests, 7 rows each"
    assert (built.slot.setup.gamma, built.slot.setup.max_batch, built.slot.setup.vocab_size) == (7, 4, 256)


def test_an_anchor_that_drafts_nothing_has_a_row_more(model: Any) -> None:
    model.sample_from_anchor = False
    on, built = served(), _install(model)
    assert built.widths == (8, 16, 24, 32)
    assert run_forward(model.forward, on, _block(on, (20,), rows=8)).hidden_states.shape[0] == 8


def test_the_sampler_is_built_beside_the_forward(model: Any) -> None:
    os.environ[SLOTS_VARIABLE] = f"none,{NAME},markov"
    built = _install(model)
    assert isinstance(built.draft_sampler, DraftSampler)
    assert built.summary().endswith("7 rows each, and 'markov' drafts")


def test_the_sampler_runs_where_the_forward_does_not_fit(model: Any) -> None:
    os.environ[SLOTS_VARIABLE] = "none,markov,@draft"
    model.layers[1].self_attn.v_scale = 0.5
    built = _install(model)
    assert built.widths == ()
    assert isinstance(built.draft_sampler, DraftSampler)
    assert "forward" not in model.__dict__


def test_every_slot_of_the_seam_keeps_the_tolerance_that_the_spec_states() -> None:
    slots = [slot for slot in Registry.discover().slots() if slot.seam == DRAFT_FORWARD]
    assert NAME in {slot.name for slot in slots}
    assert all(slot.numerics.bound <= specs.FORWARD_TOLERANCE for slot in slots)
    assert specs.DRAFT.numerics.tolerances == {DRAFT_FORWARD: specs.FORWARD_TOLERANCE}


# -- what is left to SGLang, and what is refused -----------------------------------------------------------------------


def test_what_the_slot_does_not_cover_stays_sglangs(model: Any) -> None:
    built, batch = _install(model), _block(served(), (20,))
    assert built.plan(batch.input_ids, batch, pp_proxy_tensors=None).rows == GAMMA
    assert built.plan(batch.input_ids, batch, input_embeds=torch.zeros(1)) is None
    batch.batch_size = 5
    assert built.plan(torch.zeros(5 * GAMMA), batch) is None
    batch.batch_size, batch.forward_mode = 1, ForwardMode.IDLE
    assert built.plan(batch.input_ids, batch) is None


def _attention(model: Any) -> Any:
    return model.layers[1].self_attn


MISFITS: dict[str, tuple[Any, str]] = {
    "convolution": (lambda m: setattr(m.layers[1], "mlp_conv", object()), "convolutions run over the block (layer 1)"),
    "value scale": (lambda m: setattr(_attention(m), "v_scale", 0.5), "values are scaled by 0.5"),
    "sinks": (lambda m: setattr(_attention(m), "attention_sink_bias", torch.zeros(4)), "attention has sinks"),
    "window": (lambda m: setattr(_attention(m).attn, "sliding_window_size", 64), "a sliding window of 64"),
    "causal": (
        lambda m: setattr(_attention(m).attn, "attn_type", decoder("qwen3").model.layers[0].self_attn.attn.attn_type),
        "rows of a block do not see each other (layer 1)",
    ),
    "activation": (lambda m: setattr(m.layers[1].mlp, "act_fn", torch.nn.GELU()), "the MLP's activation is GELU"),
    "another layer": (lambda m: setattr(m.layers[1], "mlp", torch.nn.Linear(2, 2)), "layer 1 has a Linear where"),
    "quantized": (lambda m: setattr(m.layers[1].mlp.down_proj, "quant_method", object()), "down_proj is quantized"),
    "norm": (lambda m: setattr(m, "norm", torch.nn.Identity()), "the last norm is a Identity"),
    "rotary start": (
        lambda m: setattr(_attention(m).rotary_emb, "position_start", 4),
        "table begins with position 4 (every layer)",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_named_slot_stops_the_server_on_a_draft_that_does_not_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.rotary_embedding import factory

    monkeypatch.setattr(factory, "_ROPE_DICT", {})  # SGLang keeps tables for models to come
    change, words = MISFITS[name]
    model = draft_of(decoder("qwen3"))
    change(model)
    with pytest.raises(ValueError, match="cannot run this setup") as caught:
        _install(model)
    (line, *_) = [line for line in str(caught.value).splitlines() if words in line] or [str(caught.value)]
    assert words in line
    assert "slot 'draft_step': " in line


def test_another_models_forward_is_not_read(model: Any) -> None:
    class Another(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> None: ...

    model.__class__ = Another
    with pytest.raises(ValueError, match="the draft is a Another, and only the forward of DSparkDraftModel is read"):
        _install(model)


def test_an_embedding_or_a_pool_that_does_not_fit_stops_the_first_forward(model: Any) -> None:
    on = served()
    _install(model)
    model.embed_tokens = torch.nn.Embedding(256, 128)
    on.pool.kv_cache_layout = "hnd"
    with pytest.raises(RuntimeError, match="slot 'draft_step' cannot run here") as caught:
        run_forward(model.forward, on, _block(on, (20,)))
    assert "layout is 'hnd'" in str(caught.value)
    assert "the target's embedding is a Embedding, not a VocabParallelEmbedding" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp_size": 2}, "tensor parallelism is in use"),
        ({"dtype": "float16"}, "dtype 'float16' is in use"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_the_seam_does_not_have_refuse_a_named_slot(
    settings: dict[str, Any], words: str, target: str, draft: str
) -> None:
    reset_context()
    message = refusal(target, draft, **({"max_running_requests": 4} | settings))
    assert f"slot 'draft_step': {words}" in message


def test_an_embedding_outside_the_graph_refuses_a_named_slot(target: str, draft: str) -> None:
    reset_context()
    os.environ["SGLANG_DSPARK_EMBED_IN_GRAPH"] = "0"
    assert "SGLANG_DSPARK_EMBED_IN_GRAPH is off" in refusal(target, draft, max_running_requests=4)
