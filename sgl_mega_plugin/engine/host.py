"""What SGLang's settings say about where slots run.

Read from the resolved server settings, alike in the process that resolves them (before weights load)
and in each model worker, so that both make the same plan. Imports SGLang inside functions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sgl_mega_plugin.contract import Backend, Feature, Host
from sgl_mega_plugin.engine import families, version

#: SGLang's features by name, as ours. The features of a single batch are not settings of a server.
_FEATURES = {
    "DP_ATTENTION": Feature.DP_ATTENTION,
    "LORA": Feature.LORA,
    "PIPELINE_PARALLEL": Feature.PIPELINE_PARALLEL,
    "RAGGED_VERIFY": Feature.RAGGED_VERIFY,
}


@dataclass(frozen=True)
class Launch:
    """A server's settings, as far as slots depend on them."""

    host: Host
    algorithm: str | None  # of speculative decoding
    decode_graphs: bool  # decode steps are CUDA graphs
    folded_proposal: bool  # the draft's proposal is part of the draft's graph
    greedy_draft: bool  # every draft row takes its argmax
    target_architectures: tuple[str, ...] = ()
    draft_architectures: tuple[str, ...] = ()
    markov_head: str | None = None  # "vanilla", "gated", "rnn"
    draft_error: str | None = None  # why the draft's configuration cannot be read
    kv_cache_dtype: str = "auto"
    embed_in_graph: bool = True  # the draft's graph begins with the embedding, not behind it
    unified_memory: bool = False  # KV slots in the request table are virtual


def from_settings(cfg: Any, hf_config: Any) -> Launch:
    """The launch that resolved settings and the target's HF configuration describe."""
    from sglang.srt.environ import envs
    from sglang.srt.kernel_plugins.nvidia import binding
    from sglang.srt.model_executor.cuda_graph_config import Backend as GraphBackend

    architectures, markov_head, error = _draft(cfg)
    return Launch(
        host=Host(
            runtime="sglang",
            isa=binding.device_isa(),
            backend=Backend.KERNEL,
            dtype=_dtype(cfg),
            model_type=getattr(hf_config, "model_type", None),
            engine_version=version.engine_version(),
            max_batch=cfg.max_running_requests,
            features=_features(cfg, binding.features_in_use(cfg)),
        ),
        algorithm=cfg.speculative_algorithm,
        decode_graphs=cfg.cuda_graph_config.decode.backend != GraphBackend.DISABLED,
        folded_proposal=bool(envs.SGLANG_DSPARK_FOLDED_PROPOSAL.get()),
        greedy_draft=bool(envs.SGLANG_DSPARK_USE_GREEDY_DRAFT.get()),
        embed_in_graph=bool(envs.SGLANG_DSPARK_EMBED_IN_GRAPH.get()),
        target_architectures=tuple(getattr(hf_config, "architectures", None) or ()),
        draft_architectures=architectures,
        markov_head=markov_head,
        draft_error=error,
        kv_cache_dtype=str(cfg.kv_cache_dtype),
        unified_memory=bool(cfg.enable_unified_memory),
    )


def from_worker() -> Launch:
    """The launch of the server that this process works for."""
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
    from sglang.srt.runtime_context import get_server_args

    record = get_server_args()
    return from_settings(resolving_view(record), model_config_of(record).hf_config)


def _features(cfg: Any, in_use: set[Any]) -> frozenset[Feature]:
    features = {_FEATURES[feature.name] for feature in in_use if feature.name in _FEATURES}
    if cfg.tp_size > 1:
        features.add(Feature.TENSOR_PARALLEL)
    return frozenset(features)


def _dtype(cfg: Any) -> str:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return str(model_config_of(cfg).dtype).removeprefix("torch.")


def _draft(cfg: Any) -> tuple[tuple[str, ...], str | None, str | None]:
    """Architectures and Markov head type of the draft, and why they cannot be read."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = cfg.speculative_draft_model_path
    if not path:
        return (), None, "no draft model is given"
    try:
        config = get_config(
            path,
            trust_remote_code=cfg.trust_remote_code,
            revision=cfg.speculative_draft_model_revision,
            model_override_args=json.loads(cfg.json_model_override_args),
            model_config_parser=cfg.model_config_parser,
        )
    except (OSError, ValueError) as error:
        return (), None, f"the configuration of draft {path!r} cannot be read: {error}"
    # SGLang's own default where the checkpoint does not say.
    head = str(getattr(config, "markov_head_type", None) or "vanilla").lower()
    return _loaded_as(config), head, None


def _loaded_as(config: Any) -> tuple[str, ...]:
    """A draft's architectures as SGLang loads them: one that is bundled with its target has a name of its own."""
    from sglang.srt.speculative.dspark_components.dspark_config import checkpoint_bundles_dspark_draft

    architectures = tuple(config.architectures or ())
    if not checkpoint_bundles_dspark_draft(config):
        return architectures
    return tuple(families.BUNDLED_DRAFTS.get(name, name) for name in architectures)
