"""Wrong arguments are errors that name the argument, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_mega_plugin.contract import Backend, Provided, SlotSetup
from sgl_mega_plugin.registry import load_cases, load_implementation
from sgl_mega_slots import SLOTS

_PROVIDED = {slot.name: Provided(slot=slot, distribution="sgl-mega-plugin", version="0") for slot in SLOTS}
_SIZES = {
    "markov": (1, 3, 97),
    "accept_tail": (1, 3, 97),
    "blockwise_rejection": (1, 3, 97),
    "sampling_cutoffs": (3, 1, 97),
    "step_inputs": (1, 3, 1),
    "attn_metadata": (1, 7, 1),
    "relay": (1, 1, 1),
    "params_once": (1, 1, 1),
    "context_kv": (1, 2, 1),
    "deferred_kv": (1, 2, 1),
    "kv_staging": (1, 1, 1),
    "histories": (1, 1, 1),
    "draft_lm_head": (1, 7, 97),
    "target_argmax_head": (1, 7, 97),
    "target_step": (1, 7, 256),
    "draft_step": (1, 7, 256),
}

#: CUDA C++: whether Triton interprets is nothing to it.
_NOT_TRITON = {"target_step", "draft_step"}

Edit = Callable[[dict[str, Any]], None]


def _first_case(name: str) -> dict[str, Any]:
    return load_cases(_PROVIDED[name])[0].make("cpu")


def _setup(name: str, **changes: Any) -> SlotSetup:
    batch, gamma, vocab = _SIZES[name]
    sizes = {"backend": Backend.INTERPRETER, "device": "cpu", "max_batch": batch, "gamma": gamma, "vocab_size": vocab}
    return SlotSetup(**(sizes | changes))


def _put(name: str, change: Callable[[Any], Any]) -> Edit:
    def edit(values: dict[str, Any]) -> None:
        values[name] = change(values[name])

    return edit


def _mixer(*, hidden: int = 8, rows: int = 16, bias: int = 16, dtype: torch.dtype = torch.bfloat16) -> Edit:
    """A gated head of R 16 and H 8, but for one of its sizes."""

    def edit(values: dict[str, Any]) -> None:
        values["draft_hidden"] = torch.zeros(1, 3, hidden, dtype=dtype)
        values["mixer_weight"] = torch.zeros(rows, 24, dtype=torch.bfloat16)
        values["mixer_bias"] = torch.zeros(bias, dtype=torch.bfloat16)

    return edit


def _every_second(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


_WRONG: list[tuple[str, Edit, str]] = [
    ("markov", _put("base_logits", lambda t: t[0]), r"base_logits: shape \(3, 97\); must be \[B, G, V\]"),
    ("markov", _put("base_logits", lambda t: t[:, :2]), "base_logits: G 2; the slot was built with G 3"),
    ("markov", _put("base_logits", lambda t: t[..., :96]), "base_logits: V 96; the slot was built with V 97"),
    ("markov", _put("base_logits", lambda t: t.repeat(2, 1, 1)), "base_logits: B 2; must be 1 to 1"),
    ("markov", _put("base_logits", _every_second), "base_logits: last axis has stride 2; must be 1"),
    ("markov", _put("markov_w2", lambda t: t.float()), "markov_w2: dtype torch.float32; must be one of torch.bfloat16"),
    ("markov", _put("markov_w1", lambda t: t.double()), "markov_w1: dtype torch.float64"),
    (
        "markov",
        _put("anchor_tokens", lambda t: t.int()),
        "anchor_tokens: dtype torch.int32; must be one of torch.int64",
    ),
    ("markov", _put("noise_offset", lambda t: t[0]), r"noise_offset: shape \(\); must be \(1,\)"),
    ("markov", _put("out_step_logits", lambda t: t.bfloat16()), "out_step_logits: dtype torch.bfloat16"),
    ("markov", _put("anchor_tokens", lambda t: t[:, None]), r"anchor_tokens: shape \(1, 1\); must be \(1,\)"),
    (
        "markov",
        _put("anchor_tokens", lambda t: t.int()),
        "anchor_tokens: dtype torch.int32; must be one of torch.int64",
    ),
    ("markov", _put("out_features", lambda _: torch.zeros(1, 3, 15)), r"out_features: shape \(1, 3, 15\)"),
    ("markov", _put("draft_hidden", lambda _: torch.zeros(1, 3, 8)), "draft_hidden: given without the rest of a mixer"),
    ("markov", _put("mixer_bias", lambda _: torch.zeros(16)), "mixer_bias: given without the rest of a mixer"),
    ("markov", _mixer(hidden=7), r"mixer_weight: shape \(16, 24\); must be \[R, H \+ R\] \(16, 23\) of a gated head"),
    ("markov", _mixer(rows=48), r"or \[3R, 2R \+ H\] \(48, 40\) of an RNN"),
    ("markov", _mixer(bias=48), r"mixer_bias: shape \(48,\); must be \(16,\)"),
    ("markov", _mixer(dtype=torch.float16), "draft_hidden: dtype torch.float16; must be one of torch.bfloat16"),
    ("accept_tail", _put("candidates", lambda t: t[:, :3]), "candidates: T 3; the slot was built with T 4"),
    ("accept_tail", _put("target_logits", lambda t: t[:, :9]), "target_logits: V 9; the slot was built with V 97"),
    ("accept_tail", _put("target_logits", _every_second), "target_logits: last axis has stride 2"),
    ("accept_tail", _put("target_logits", lambda t: t[:3]), r"target_logits: shape \(3, 97\); must be \(4, 97\)"),
    (
        "accept_tail",
        _put("verify_lens", lambda t: t.long()),
        "verify_lens: dtype torch.int64; must be one of torch.int32",
    ),
    ("accept_tail", _put("out_new_seq_lens", lambda t: t.int()), "out_new_seq_lens: dtype torch.int32"),
    ("accept_tail", _put("target_logits", lambda t: None), "target_logits, target_tokens: exactly one of them"),
    ("accept_tail", _put("target_tokens", lambda _: torch.zeros(1, 4)), "target_logits, target_tokens: exactly one"),
    ("accept_tail", _put("simulated_correct", lambda _: torch.zeros(2)), r"simulated_correct: shape \(2,\)"),
    ("sampling_cutoffs", _put("top_ks", lambda t: t.long()), "top_ks: dtype torch.int64; must be one of torch.int32"),
    ("sampling_cutoffs", _put("out_cutoffs", lambda t: t[:3]), r"out_cutoffs: shape \(3,\); must be \(6,\)"),
    ("sampling_cutoffs", _put("target_logits", lambda t: t[:, :9]), "target_logits: V 9; the slot was built with V 97"),
    ("sampling_cutoffs", _put("verify_lens", lambda t: t.repeat(2)), "verify_lens: B 6; must be 1 to 3"),
    (
        "blockwise_rejection",
        _put("simulated_correct", lambda _: torch.zeros(1, dtype=torch.int32)),
        "simulated_correct, simulated_seed: both or neither",
    ),
    ("blockwise_rejection", _put("target_cutoffs", lambda _: torch.zeros(9)), r"target_cutoffs: shape \(9,\)"),
    ("blockwise_rejection", _put("candidates", lambda t: t[:, :3]), "candidates: T 3; the slot was built with T 4"),
    ("blockwise_rejection", _put("target_logits", _every_second), "target_logits: last axis has stride 2"),
    ("blockwise_rejection", _put("draft_logits", lambda t: t[:, :2]), r"draft_logits: shape \(1, 2, 97\); must be"),
    (
        "blockwise_rejection",
        _put("draft_logits", lambda t: t.repeat(1, 1, 2)),
        "draft_logits: 194 ids; must be 1 to V, 97",
    ),
    ("blockwise_rejection", _put("draft_logits", lambda t: t.double()), "draft_logits: dtype torch.float64"),
    ("blockwise_rejection", _put("target_temperatures", lambda t: t[:, None]), r"target_temperatures: shape \(1, 1\)"),
    ("blockwise_rejection", _put("noise_offset", lambda t: t.int()), "noise_offset: dtype torch.int32"),
    ("step_inputs", _put("req_to_token", lambda t: t.long()), "req_to_token: dtype torch.int64"),
    ("step_inputs", _put("max_positions", lambda n: 0), "max_positions: 0; must be at least 1"),
    ("step_inputs", _put("out_draft_ids", lambda t: t[:, :2]), r"out_draft_ids: shape \(1, 2\); must be \(1, 3\)"),
    ("step_inputs", _put("relay_lens", lambda _: torch.zeros(3).long()), "relay_lens: given alone; pass both relays"),
    ("step_inputs", _put("relay_tokens", lambda _: torch.zeros(3).long()), "relay_tokens: given alone; pass both"),
    ("step_inputs", _put("out_seq_lens", lambda _: torch.zeros(1).int()), "out_seq_lens: dtype torch.int32"),
    ("step_inputs", _put("out_anchor_tokens", lambda _: torch.zeros(2).long()), r"out_anchor_tokens: shape \(2,\)"),
    ("attn_metadata", _put("page_size", lambda _: 3), "page_size: 3; must be a power of two"),
    ("attn_metadata", _put("kv_rows", lambda _: -1), "kv_rows: -1; must be 0 to 2147483647"),
    ("attn_metadata", _put("query_rows", lambda _: 0), "query_rows: 0; must be 1 to 2147483647"),
    ("attn_metadata", _put("req_to_token", _every_second), "req_to_token: last axis has stride 2"),
    ("attn_metadata", _put("req_to_token", lambda t: t[:, :0]), "req_to_token and the page tables: no column"),
    ("attn_metadata", _put("out_page_table", lambda t: t.long()), "out_page_table: dtype torch.int64"),
    ("attn_metadata", _put("out_kv_indptr", lambda t: t[1:]), r"out_kv_indptr: shape \(1,\); must be \(2,\)"),
    ("attn_metadata", _put("location_map", lambda _: torch.zeros(2, 2).long()), r"location_map: shape \(2, 2\)"),
    ("attn_metadata", _put("out_window_kv_offsets", lambda _: torch.zeros(1).int()), "given with window 0; pass None"),
    (
        "attn_metadata",
        lambda values: values.update(window=2, out_window_kv_indices=torch.zeros(9).int()),
        "out_window_kv_indices: given without out_window_kv_indptr",
    ),
    ("relay", _put("bonus_tokens", lambda t: t.int()), "bonus_tokens: dtype torch.int32"),
    ("relay", _put("out_relay_tokens", lambda t: t[1:]), r"out_relay_tokens: shape \(8,\); must be \(9,\)"),
    ("relay", _put("out_next_seq_lens", lambda t: t.int()), "out_next_seq_lens: dtype torch.int32"),
    ("params_once", _put("top_ks", lambda t: t.repeat(2)), "top_ks: n 2; must be at most B, 1"),
    ("params_once", _put("temperatures", lambda t: t.repeat(2)), r"temperatures: shape \(2,\); must be \(1,\)"),
    ("params_once", _put("temperatures", lambda t: t.view(1, 1, 1)), r"temperatures: shape \(1, 1, 1\); must be"),
    ("params_once", _put("temperatures", lambda t: t[0]), r"temperatures: shape \(\); must be \(1,\)"),
    ("params_once", _put("temperatures", lambda t: t.int()), "temperatures: dtype torch.int32; must be one of"),
    ("params_once", _put("out_greedy", lambda t: t.int()), "out_greedy: dtype torch.int32; must be one of torch.bool"),
    ("context_kv", _put("projected_kv", lambda t: t[:, 0]), r"projected_kv: shape .*; must be \[B \* T, L, 2, H, D\]"),
    ("context_kv", _put("projected_kv", lambda t: t[..., :63]), "projected_kv: D 63; must be even"),
    ("context_kv", _put("out_keys", lambda b: b[:1]), "out_keys: 1 buffers; must be 2"),
    ("context_kv", _put("out_values", lambda b: [b[0], b[1].half()]), r"out_values\[1\]: dtype torch.float16"),
    (
        "context_kv",
        _put("out_values", lambda b: [b[0], torch.zeros(40, 4, 64).bfloat16()[:, :2]]),
        r"out_values\[1\]: strides",
    ),
    ("context_kv", _put("cos_sin", lambda t: t.bfloat16()), "cos_sin: dtype torch.bfloat16"),
    ("context_kv", _put("cos_sin", lambda t: t[:, :7]), "cos_sin: R 7; must be even, from 2 to D, 64"),
    ("context_kv", _put("cos_sin", lambda t: t.repeat(1, 2)), "cos_sin: R 128; must be even, from 2 to D, 64"),
    ("context_kv", _put("eps", lambda _: 0.0), "eps: 0.0; must be at least 1e-30"),
    ("context_kv", _put("kv_scales", lambda _: torch.ones(2, 2)), "kv_scales: given with a torch.bfloat16 cache"),
    ("context_kv", _put("kv_scales", lambda _: torch.ones(2)), r"kv_scales: shape \(2,\); must be \(2, 2\)"),
    ("context_kv", _put("ring_rows", lambda _: torch.ones(1).long()), "ring_size: 0; must be at least 1"),
    ("context_kv", _put("location_map", lambda _: torch.ones(9)), "location_map: dtype torch.float32"),
    (
        "context_kv",
        lambda values: values.update(location_map=torch.ones(9).long(), ring_rows=torch.ones(1).long()),
        "location_map, ring_rows: both are given",
    ),
    ("deferred_kv", _put("out_commit_lens", lambda t: t.long()), "out_commit_lens: dtype torch.int64"),
    ("kv_staging", _put("out_commit_lens", lambda t: t[:0]), "out_commit_lens: M 0; must be at least B, 1"),
    ("kv_staging", _put("out_positions", lambda t: t.int()), "out_positions: dtype torch.int32"),
    ("histories", _put("tokens", lambda t: t[:, :1]), "tokens: T 1; the slot was built with T 2"),
    ("histories", _put("out_histories", lambda t: t[:, :0]), "out_histories: N 0; must be 1 to 4096"),
    ("histories", _put("out_histories", lambda t: t.float()), "out_histories: dtype torch.float32"),
]


@pytest.mark.parametrize(("name", "edit", "message"), _WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(_WRONG)])
def test_wrong_argument(name: str, edit: Edit, message: str) -> None:
    values = _first_case(name)
    edit(values)
    with pytest.raises(ValueError, match=message):
        load_implementation(_PROVIDED[name])(_setup(name))(**values)


@pytest.mark.parametrize("name", sorted(_PROVIDED))
def test_right_arguments_pass(name: str) -> None:
    load_implementation(_PROVIDED[name])(_setup(name))(**_first_case(name))


@pytest.mark.parametrize("name", sorted(_PROVIDED))
def test_wrong_backend(name: str) -> None:
    build = load_implementation(_PROVIDED[name])
    with pytest.raises(ValueError, match=f"{name}: backend 'reference' is served by the slot's reference function"):
        build(_setup(name, backend=Backend.REFERENCE))
    with pytest.raises(ValueError, match=f"{name}: backend 'kernel' on device 'cpu'"):
        build(_setup(name, backend=Backend.KERNEL))


@pytest.mark.parametrize("name", sorted(_PROVIDED.keys() - _NOT_TRITON))
def test_wrong_mode_of_triton(name: str) -> None:
    build = load_implementation(_PROVIDED[name])
    with pytest.raises(RuntimeError, match=f"{name}: backend 'kernel' while TRITON_INTERPRET is set; unset it"):
        build(_setup(name, backend=Backend.KERNEL, device="cuda:0"))
