"""Resolves SGLang's server settings as a launch does, up to the point where weights would load."""

from __future__ import annotations

import os
from typing import Any

import pytest
from sglang.srt.kernel_plugins.nvidia import binding
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs


def resolve(target: str, draft: str | None, **settings: Any) -> ServerArgs:
    """The resolved settings of a server with the flag; raises ValueError with every reason otherwise."""
    speculative = {} if draft is None else {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": draft}
    fixed: dict[str, Any] = {
        "model_path": target,
        "device": "cuda",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": "fa3",
        "mem_fraction_static": 0.5,
        "enable_nvidia_megakernel": True,
    }
    load_plugins()
    record = ServerArgs(**{**fixed, **speculative, **settings})
    record.resolve_once()
    return record


def refusal(target: str, draft: str | None, **settings: Any) -> str:
    """The message of a server that must not start."""
    with pytest.raises(ValueError, match="--enable-nvidia-megakernel cannot run this setup") as caught:
        resolve(target, draft, **settings)
    return str(caught.value)


def outcome_in_child(target: str, draft: str, isa: str) -> dict[str, Any]:
    """What a spawned process sees: the refusal or None, its environment and its registered architectures."""
    from sglang.kernels.plugin_kernels.nvidia.spec import registered_architectures

    binding.device_isa = lambda: isa  # a patch of the parent does not reach a spawned process
    load_plugins()
    architectures = registered_architectures()
    inherited = dict(os.environ)
    try:
        resolve(target, draft)
    except ValueError as error:
        return {"refusal": str(error), "environ": inherited, "architectures": architectures}
    return {"refusal": None, "environ": inherited, "architectures": architectures}


def switches_in_child() -> dict[str, Any]:
    """What a spawned worker reads: the value of every variable that SGLang knows, once its plugins are loaded."""
    from sglang.srt.environ import EnvField, Envs, envs

    load_plugins()
    fields = {name for kind in Envs.__mro__ for name, field in vars(kind).items() if isinstance(field, EnvField)}
    return {name: getattr(envs, name).get() for name in sorted(fields)}
