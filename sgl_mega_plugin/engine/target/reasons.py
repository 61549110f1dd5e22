"""Whether a server's settings let a slot run the target's verify forward. Imports neither torch nor SGLang."""

from __future__ import annotations

from sgl_mega_plugin.contract import Feature
from sgl_mega_plugin.engine.host import Launch

TARGET_FORWARD = "target_forward"
#: Architectures whose SGLang model is the dense decoder of the seam; ``dense_model`` looks at the loaded model.
ARCHITECTURES = (
    "IQuestCoderForCausalLM",
    "InternLM3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
#: Values of --kv-cache-dtype that keep keys and values as bf16 beside a bf16 model, or as fp8 without scales.
KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3")

_FEATURES = {
    Feature.TENSOR_PARALLEL: "tensor parallelism is in use, and a rank has a part of each matrix only",
    Feature.DP_ATTENTION: "data-parallel attention is in use, and ranks run forwards without requests",
    Feature.PIPELINE_PARALLEL: "pipeline parallelism is in use, and a rank has some of the layers only",
    Feature.RAGGED_VERIFY: "ragged verify is in use, and requests have different numbers of rows",
    Feature.LORA: "LoRA is in use, and the seam has no adapters",
}


def target_forward_reasons(launch: Launch) -> list[str]:
    """Why no slot can run the target's verify forward under these settings; empty when one can."""
    reasons = []
    if not set(launch.target_architectures) & set(ARCHITECTURES):
        reasons.append(f"target architecture {list(launch.target_architectures)} is none of {list(ARCHITECTURES)}")
    return reasons + decoder_reasons(launch)


def decoder_reasons(launch: Launch) -> list[str]:
    """Why no slot can run a dense decoder's forward under these settings, the target's or the draft's."""
    reasons = [why for feature, why in _FEATURES.items() if feature in launch.host.features]
    if launch.host.dtype != "bfloat16":
        reasons.append(f"dtype {launch.host.dtype!r} is in use; the seam's weights are 'bfloat16'")
    if launch.kv_cache_dtype not in KV_DTYPES:
        reasons.append(f"--kv-cache-dtype {launch.kv_cache_dtype!r} is in use; the seam's are bf16 or fp8_e4m3")
    if launch.unified_memory:
        reasons.append("--enable-unified-memory is in use, and the request table has virtual slots")
    return reasons
