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
    "step_inputs": (1, 3, 1),
    "context_kv": (1, 2, 1),
}

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
    with pytest.raises(RuntimeError, match=f"{name}: backend 'kernel' while TRITON_INTERPRET is set; unset it"):
        build(_setup(name, backend=Backend.KERNEL, device="cuda:0"))


def test_rank_too_large_for_shared_memory() -> None:
    values = _first_case("markov")
    values["markov_w1"] = values["markov_w2"] = torch.zeros(97, 600, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="markov_w1: R 600 of 2 bytes each; must be at most 512"):
        load_implementation(_PROVIDED["markov"])(_setup("markov"))(**values)
