"""Builds SGLang's DeepSeek-V4.1 models on tensors without storage: every shape, no memory, no GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

Shapes = dict[str, tuple[tuple[int, ...], int]]  # by parameter: shape, bytes


def built_on_meta(folder: str) -> dict[str, Any]:
    """Shapes of the target's and the draft's parameters, and dtypes of the draft's Markov head.

    Starts SGLang's parallel groups, which are global: for a process of its own.
    """
    from engine_server import resolve
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.kernel_plugins.nvidia import binding
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.runtime_context import SpawnRanks, publish

    binding.device_isa = lambda: "sm_90"
    record = resolve(folder, None, attention_backend=None, speculative_algorithm="DSPARK")
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}/rendezvous"
    )
    initialize_model_parallel()
    initialize_dp_attention(server_args=record)
    _stand_in_for_an_accelerator()
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
    from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark

    torch.set_default_dtype(torch.bfloat16)
    config = model_config_of(record).hf_config
    quantization = getattr(config, "quantization_config", None)
    method = None if quantization is None else Fp8Config.from_config(quantization)
    with torch.device("meta"):
        target, draft = DeepseekV4ForCausalLM(config, method), DeepseekV4ForCausalLMDSpark(config, method)
    head = draft.markov_head
    return {
        "target": _shapes(target),
        "draft": _shapes(draft),
        "stage_inputs": draft.stages[0].main_proj.weight.shape[1],
        "step_logits": (_name(draft.markov_head.markov_w2.weight.dtype), _name(head.step_logits_dtype(torch.bfloat16))),
    }


def blocks_of_the_bundled_head(cases: list[tuple[int, list[float], bool]]) -> list[dict[str, Any]]:
    """Blocks of SGLang's sampler with the bundled draft's Markov head, by itself and by our step, a pair a case.

    A case is a batch size, its temperatures, and whether the draft is greedy. For a process of its own: SGLang's module
    of that head does not go well with the end of one.
    """
    import test_engine_draft_sampler as tools
    from engine_decoders import one_rank
    from sglang.srt.models.deepseek_v4_dspark import DSparkV4MarkovHead

    from sgl_mega_plugin.engine.draft.sampler import head_reasons, model_reasons

    torch.cuda.is_current_stream_capturing = lambda: False
    tools.engine.megakernel_agree = lambda value, *, what, group: None
    tools.engine.get_dp_tp_group = lambda: None
    found = []
    with one_rank():
        for bs, temperatures, greedy in cases:
            head = DSparkV4MarkovHead(**tools.SIZES)
            model = tools.Model(torch.bfloat16, True, head)
            ours = tools._ours(model, named=True)
            blocks = [
                tools._run(*tools._sampler(model, greedy=greedy, megakernel=step), model, bs, temperatures)
                for step in (None, ours)
            ]
            sampled = [row for row, temperature in enumerate(temperatures) if temperature]
            logits = [block.step_logits for block in blocks if block.step_logits is not None]
            found.append(
                {
                    "tokens": [block.tokens.tolist() for block in blocks],
                    "offsets": [block.offset for block in blocks],
                    "logits": [kept[sampled].tolist() for kept in logits],
                    "dtypes": [_name(kept.dtype) for kept in logits],
                    "rows of the embedding": len(head.markov_w1.weight),
                    "reasons": model_reasons(model) + head_reasons(model, logits[0] if logits else None),
                }
            )
    return found


def _shapes(model: torch.nn.Module) -> Shapes:
    return {name: (tuple(p.shape), p.numel() * p.element_size()) for name, p in model.named_parameters()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stand_in_for_an_accelerator() -> None:
    """What SGLang's rotary embedding asks of a machine without one: vLLM's operator, and a device."""
    from sglang.srt.layers.rotary_embedding import rope_variant

    operators = ModuleType("vllm._custom_ops")
    operators.rotary_embedding = None  # type: ignore[attr-defined]
    sys.modules.update({"vllm": ModuleType("vllm"), "vllm._custom_ops": operators})
    rope_variant.get_device = lambda *args, **kwargs: "meta"
