"""Everything that depends on the engine's version.

Says which engine and API versions are served, finds out which ones are here, and puts what does
not fit into words. Imports the engine only inside functions, so that ``doctor`` can ask without it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, entry_points
from importlib.metadata import version as installed_version

from sgl_mega_plugin.contract.releases import API_VERSION as API_VERSION
from sgl_mega_plugin.contract.releases import ENGINE_VERSIONS as ENGINE_VERSIONS

ENGINE_DISTRIBUTION = "sglang"
ENTRY_POINT_GROUP = "sglang.srt.plugins"
ENTRY_POINT = "nvidia_megakernel"


class UnsupportedEngineError(RuntimeError):
    """An engine whose contract the specs are not written against."""


def engine_version() -> str | None:
    """The installed SGLang release without a local label ("0.5.23"), or None without SGLang."""
    try:
        return installed_version(ENGINE_DISTRIBUTION).partition("+")[0]
    except PackageNotFoundError:
        return None


def api_version() -> int:
    """The megakernel API version of the engine that is imported here."""
    from sglang.kernels.plugin_kernels.nvidia import spec

    return int(spec.MEGAKERNEL_API_VERSION)


def engine_has_switch(name: str) -> bool:
    """Whether the engine itself reads an environment variable of this name."""
    from sglang.srt.environ import envs

    return hasattr(envs, name)


def providers() -> tuple[str, ...]:
    """Every distribution that has the entry point SGLang loads for its megakernel flag, as "name version"."""
    found = entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT)
    return tuple(sorted(f"{point.dist.name} {point.dist.version}" for point in found if point.dist is not None))


def require_api() -> None:
    """Raise :class:`UnsupportedEngineError` unless the engine here has the API version of the specs."""
    reasons = api_reasons(api_version())
    if reasons:
        raise UnsupportedEngineError("; ".join(reasons))


def api_reasons(api: int) -> list[str]:
    """Why an API version cannot be served; empty when it can."""
    if api == API_VERSION:
        return []
    return [
        f"megakernel API version {api} is not served: sgl-mega-plugin implements version {API_VERSION}; "
        f"use SGLang {_served()}, or a newer sgl-mega-plugin"
    ]


def release_reasons(engine: str | None) -> list[str]:
    """Why a release of SGLang cannot be served; empty when it can. None is no SGLang at all."""
    if engine in ENGINE_VERSIONS:
        return []
    seen = "no installed SGLang" if engine is None else f"SGLang {engine}"
    return [f"{seen} is not supported: sgl-mega-plugin serves SGLang {_served()}; install that release"]


def provider_reasons(names: tuple[str, ...]) -> list[str]:
    """Why the distributions that provide the entry point cannot be together; empty for one."""
    if len(names) <= 1:
        return []
    return [
        f"{len(names)} distributions have the entry point {ENTRY_POINT!r}: {', '.join(names)}; "
        f"SGLang keeps one of them and drops the rest without a word, so uninstall all but one"
    ]


def reasons() -> list[str]:
    """Why this installation cannot be served; empty when it can."""
    return api_reasons(api_version()) + release_reasons(engine_version()) + provider_reasons(providers())


def _served() -> str:
    return " or ".join(sorted(ENGINE_VERSIONS))
