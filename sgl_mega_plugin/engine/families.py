"""Which models of SGLang get a spec, as data.

A target qualifies if its SGLang model has ``set_dflash_layers_to_capture`` or ``set_dspark_layers_to_capture``
(so that a DSpark draft can read its layers) and every layer keeps plain keys and values a token: nothing else has to be
rolled back or committed when a block is rejected. A dense or a mixture-of-experts MLP both do. The
others are listed with what they keep instead, and a test compares these tables with SGLang's models.

DeepSeek-V4.1 keeps more than that and is served all the same: its checkpoint brings the draft along, and
SGLang's own code commits what its layers keep. There the engine's switches run, and no slot that commits.
"""

from __future__ import annotations

#: Target architectures that get the target's spec.
TARGETS = (
    "BeamForCausalLM",
    "Gemma4ForCausalLM",
    "GptOssForCausalLM",
    "IQuestCoderForCausalLM",
    "InternLM3ForCausalLM",
    "LagunaForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "MellumForCausalLM",
    "MiMoV2FlashForCausalLM",
    "Ministral3ForCausalLM",
    "MistralForCausalLM",
    "MuseGlimmerForCausalLM",
    "NanbeigeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "TeleFLMForCausalLM",
)

#: Draft architectures that get the draft's spec: SGLang's dense draft model and its aliases.
DRAFTS = (
    "DSparkDraftModel",
    "LingDSparkModel",
    "Qwen3DSparkModel",
)

#: Targets whose checkpoint brings its draft along, each with the HF model types that get the target's spec.
BUNDLED_TARGETS: dict[str, tuple[str, ...]] = {"DeepseekV4ForCausalLM": ("deepseek_v41",)}

#: What SGLang makes of such a checkpoint's architecture when it loads the draft from it.
BUNDLED_DRAFTS: dict[str, str] = {"DeepseekV4ForCausalLM": "DeepseekV4ForCausalLMDSpark"}

#: Every architecture with a spec.
ALL_TARGETS = (*TARGETS, *BUNDLED_TARGETS)
ALL_DRAFTS = (*DRAFTS, *BUNDLED_DRAFTS.values())

_LATENT = "latent attention: one compressed row a token"
_RECURRENT = "recurrent layers: a state a request beside keys and values"
_MULTIMODAL = "image, video or audio inputs"
_NO_TARGET = "no target: another method's draft, or an encoder"

#: What else a DSpark draft can read the layers of, with the reason why it gets no spec.
LEFT_OUT: dict[str, str] = {
    "BailingMoeV3ForCausalLM": _RECURRENT,
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV32ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Glm4MoeLiteForCausalLM": _LATENT,
    "GlmMoeDsaForCausalLM": _LATENT,
    "MistralLarge3ForCausalLM": _LATENT,
    "KimiK3LinearForCausalLM": _RECURRENT,
    "KimiLinearForCausalLM": _RECURRENT,
    "Lfm2ForCausalLM": _RECURRENT,
    "Lfm2MoeForCausalLM": _RECURRENT,
    "NemotronHForCausalLM": _RECURRENT,
    "NemotronHPuzzleForCausalLM": _RECURRENT,
    "Qwen3NextForCausalLM": _RECURRENT,
    "Qwen3_5ForCausalLM": _RECURRENT,
    "Qwen3_5MoeForCausalLM": _RECURRENT,
    "Cosmos3ForConditionalGeneration": _MULTIMODAL,
    "Gemma4ForConditionalGeneration": _MULTIMODAL,
    "Gemma4UnifiedForConditionalGeneration": _MULTIMODAL,
    "Glm5NextForConditionalGeneration": _MULTIMODAL,
    "InklingForConditionalGeneration": _MULTIMODAL,
    "InternS1ProForConditionalGeneration": _MULTIMODAL,
    "InternS2MobiusForConditionalGeneration": _MULTIMODAL,
    "InternS2PreviewForConditionalGeneration": _MULTIMODAL,
    "KimiK25ForConditionalGeneration": _MULTIMODAL,
    "KimiK3ForConditionalGeneration": _MULTIMODAL,
    "Lfm2VlForConditionalGeneration": _MULTIMODAL,
    "MiMoV2ForCausalLM": _MULTIMODAL,
    "MiniMaxM3SparseForConditionalGeneration": _MULTIMODAL,
    "MuseGlimmerForConditionalGeneration": _MULTIMODAL,
    "MuseSparkForConditionalGeneration": _MULTIMODAL,
    "NemotronH_Nano_Omni_Reasoning_V3": _MULTIMODAL,
    "NemotronH_Nano_VL_V2": _MULTIMODAL,
    "NemotronH_Omni_Reasoning_V3": _MULTIMODAL,
    "Qwen3VLForConditionalGeneration": _MULTIMODAL,
    "Qwen3VLMoeForConditionalGeneration": _MULTIMODAL,
    "Qwen3_5ForConditionalGeneration": _MULTIMODAL,
    "Qwen3_5MoeForConditionalGeneration": _MULTIMODAL,
    "Qwen4ExpForConditionalGeneration": _MULTIMODAL,
    "DeepseekV3ForCausalLMNextN": _NO_TARGET,
    "DeepseekV4ForCausalLMNextN": _NO_TARGET,
    "Gemma4AssistantForCausalLM": _NO_TARGET,
    "Gemma4UnifiedAssistantForCausalLM": _NO_TARGET,
    "Glm4MoeLiteForCausalLMNextN": _NO_TARGET,
    "Glm5NextForConditionalGenerationNextN": _NO_TARGET,
    "GlmMoeDsaForCausalLMNextN": _NO_TARGET,
    "Lfm2BidirectionalModel": _NO_TARGET,
    "LlamaForCausalLMEagle": _NO_TARGET,
    "LlamaForCausalLMEagle3": _NO_TARGET,
    "MiMoV2MTP": _NO_TARGET,
    "MistralForCausalLMEagle": _NO_TARGET,
    "MistralLarge3ForCausalLMEagle": _NO_TARGET,
    "NemotronHForCausalLMMTP": _NO_TARGET,
    "Qwen3MoeForCausalLMMTP": _NO_TARGET,
    "Qwen3NextForCausalLMMTP": _NO_TARGET,
}

#: Drafts on SGLang's dense draft model whose only targets are left out above.
DRAFTS_LEFT_OUT: dict[str, str] = {
    "Lfm2DSparkDraftModel": _RECURRENT,
    "DSparkMiniMaxDraftModel": _MULTIMODAL,
}
