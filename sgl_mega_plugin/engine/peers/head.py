"""SGLang's LM head, of the draft and of the target."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from sgl_mega_plugin.engine.peers.peer import Arguments, Call, Outputs, engine_peer


def _draft(arguments: Arguments) -> Call:
    """``compute_base_logits`` of one rank: the matmul on the padded vocabulary, then a view of V columns."""
    from sglang.srt.models.dspark import project_through_lm_head

    head = SimpleNamespace(weight=arguments["lm_head_weight"], quant_method=None)
    divisor, vocab = arguments["divisor"], arguments["vocab_size"]
    outputs = [arguments[name] for name in ("out_logits", "out_tokens") if arguments[name] is not None]
    batch, gamma = outputs[0].shape[:2]
    rows = arguments["hidden"][:, -gamma:].reshape(batch * gamma, -1)
    tokens = arguments["out_tokens"] is not None

    def call() -> Outputs:
        hidden = rows if divisor == 1.0 else rows / divisor
        logits = project_through_lm_head(hidden, head)[:, :vocab].view(batch, gamma, vocab)
        if tokens:
            return {"out_tokens": logits.argmax(-1)}
        return {}  # a float, which the bench does not compare

    return call


def _target(arguments: Arguments, *, fused: bool) -> Call:
    """The logits processor of one rank without soft cap, and the accept's argmax: matmul, cast to fp32, argmax."""
    from sglang.kernels.ops.speculative.dspark.dspark_accept import _row_argmax

    weight, divisor, vocab = arguments["lm_head_weight"], arguments["divisor"], arguments["vocab_size"]
    hidden, shape = arguments["hidden"], arguments["out_tokens"].shape
    buffer = torch.empty(len(hidden), vocab, dtype=torch.float32, device=hidden.device)

    def cast(logits: Tensor) -> Tensor:
        if logits.is_cuda and logits.dtype in (torch.float16, torch.bfloat16):
            from sglang.srt.layers.logits_processor import cast_to_float32_logits

            found: Tensor = cast_to_float32_logits(logits, buffer)
            return found
        return buffer.copy_(logits)

    def call() -> Outputs:
        states = hidden if divisor == 1.0 else hidden / divisor
        logits = torch.matmul(states.to(weight.dtype), weight.T)[:, :vocab]
        return {"out_tokens": _row_argmax(cast(logits), fused=fused).view(shape)}

    return call


PEERS = {
    "draft_logits": (
        engine_peer("engine-eager", "project_through_lm_head, and argmax where tokens are wanted", _draft),
    ),
    "target_argmax": (
        engine_peer(
            "engine-eager",
            "matmul, logits cast to fp32, torch.argmax",
            lambda arguments: _target(arguments, fused=False),
        ),
        engine_peer(
            "engine-switches",
            "the same with the row argmax of the fused accept tail",
            lambda arguments: _target(arguments, fused=True),
        ),
    ),
}
