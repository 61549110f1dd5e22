"""pytest plugin for authors of slots: the fixture ``conform_slot`` and its options ``--sgl-mega-*``.

Loaded by pytest in every project where this package is installed, so it imports nothing heavy until
a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sgl-mega-plugin")
    group.addoption(
        "--sgl-mega-device",
        default="cpu",
        metavar="DEVICE",
        help="device that conform_slot runs on: 'cpu' (Triton's interpreter) or 'cuda' (default: cpu)",
    )
    group.addoption(
        "--sgl-mega-generated",
        default=20,
        type=int,
        metavar="N",
        help="random cases that conform_slot adds to a slot's own (default: 20)",
    )
    group.addoption(
        "--sgl-mega-seed", default=0, type=int, metavar="SEED", help="of conform_slot's random cases (default: 0)"
    )


@pytest.fixture(scope="session")
def conform_slot(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A function that runs an installed slot, by name, through its cases, generated ones and its law."""
    from sgl_mega_plugin.conformance.backend import prepare

    device = str(request.config.getoption("--sgl-mega-device"))
    generated, seed = (int(request.config.getoption(f"--sgl-mega-{name}")) for name in ("generated", "seed"))
    backend = prepare(device)

    def run(name: str) -> None:
        from sgl_mega_plugin.conformance.runner import conform
        from sgl_mega_plugin.registry import Registry

        (result,) = conform(
            Registry.discover(),
            device=device,
            backend=backend,
            names=[name],
            generated=generated,
            seed=seed,
            law=None,
        ).slots
        if not result.ok:
            pytest.fail("\n".join(case.text for case in result.failures), pytrace=False)

    return run
