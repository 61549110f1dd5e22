"""Tests against the real SGLang. They never skip: without the release they are written for, they do not start."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_mega_plugin.engine.version import ENGINE_VERSIONS, ENTRY_POINT, ENTRY_POINT_GROUP


def _check_installation() -> None:
    try:
        release = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        release = "none"
    if release not in ENGINE_VERSIONS:
        raise pytest.UsageError(
            f"tests/engine runs the code of SGLang {' or '.join(sorted(ENGINE_VERSIONS))}; installed is {release}. "
            f"Run 'make test', which installs it, or 'pip install sgl-mega-plugin[engine]'."
        )
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT)
    if not any(point.value.startswith("sgl_mega_plugin.") for point in points):
        raise pytest.UsageError(
            f"tests/engine needs the entry point {ENTRY_POINT!r} of sgl-mega-plugin, so the package has to be "
            f"installed: run 'pip install --no-deps -e .' in the source folder."
        )


_check_installation()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang's own at import, where no GPU is
    # The models and the arguments import lazily, and warn as they do.
    import sglang.srt.speculative.dspark_components.dspark_draft_sampler  # noqa: F401
    from sglang.kernels.plugin_kernels.nvidia import spec
    from sglang.srt import plugins
    from sglang.srt.kernel_plugins.nvidia import binding
    from sglang.srt.models import dspark  # noqa: F401
    from sglang.srt.server_args import ServerArgs  # noqa: F401

from engine_configs import write_draft, write_target  # noqa: E402

from sgl_mega_plugin.engine import entry  # noqa: E402
from sgl_mega_plugin.engine.fold import install as fold  # noqa: E402
from sgl_mega_plugin.engine.log import watch  # noqa: E402
from sgl_mega_plugin.switch import KNOWN_VARIABLES  # noqa: E402

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            # Warnings of SGLang and of what it imports are not ours to fix.
            for module in (r"sglang\..*", r"transformers\..*", r"torch\..*"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:::{module}"))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which no plugin is loaded, none of our variables is set, and the GPU is an sm_90."""
    saved = dict(os.environ)
    for name in (*KNOWN_VARIABLES, "SGLANG_PLUGINS"):
        os.environ.pop(name, None)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(spec, "_REGISTRY", {})
    monkeypatch.setattr(binding, "device_isa", lambda: "sm_90")
    entry.conflicts.clear()
    entry.failures.clear()
    monkeypatch.setattr(fold, "_proof", None)
    yield
    watch.remove()
    worker = sys.modules.get(fold.MODULE)
    if worker is not None:
        worker.DSparkWorkerV2 = getattr(worker.DSparkWorkerV2, "_sgl_mega_base", worker.DSparkWorkerV2)
    os.environ.clear()
    os.environ.update(saved)


@pytest.fixture
def target(tmp_path: Path) -> str:
    return write_target(tmp_path / "target")


@pytest.fixture
def draft(tmp_path: Path) -> str:
    return write_draft(tmp_path / "draft")
