"""The entry point that SGLang calls in each of its processes.

Registers the specs by path and sets the engine's switches under the master switch; nothing else, and no
work at import. SGLang logs and skips an entry function that raises, so whatever is wrong
here is kept for the reasons of the target's spec, which stop the server and name the cause. A
missing dependency shows the same way: the registered spec does not import, and SGLang says why.
"""

from __future__ import annotations

import logging
import os

from sgl_mega_plugin.engine import families, version

logger = logging.getLogger(__name__)

TARGET_PATH = "sgl_mega_plugin.engine.specs:TARGET"
DRAFT_PATH = "sgl_mega_plugin.engine.specs:DRAFT"

#: Architectures whose spec another plugin registered first, with SGLang's message that names it.
conflicts: dict[str, str] = {}
#: What failed in :func:`register`, in words.
failures: list[str] = []


def register() -> None:
    """Register the specs, then apply the master switch. Calling it again changes nothing."""
    failures.clear()
    _register_specs()
    try:
        _apply_master_switch()
    except Exception as error:  # kept for the spec's reasons: SGLang would log it and go on
        failures.append(f"sgl-mega-plugin's entry function failed: {type(error).__name__}: {error}")
        logger.exception("sgl-mega-plugin: the master switch could not be applied")


def _register_specs() -> None:
    from sglang.kernels.plugin_kernels.nvidia.spec import register as register_spec

    paths = dict.fromkeys(families.ALL_TARGETS, TARGET_PATH) | dict.fromkeys(families.ALL_DRAFTS, DRAFT_PATH)
    for architecture, path in paths.items():
        try:
            register_spec(architecture=architecture, path=path)
        except ValueError as error:
            conflicts[architecture] = f"{error}; sgl-mega-plugin has {path}. Uninstall one of the two"
            logger.warning("sgl-mega-plugin: %s", conflicts[architecture])


def _apply_master_switch() -> None:
    from sgl_mega_plugin import switch
    from sgl_mega_plugin.contract.errors import SwitchError

    try:
        switch.apply_master_switch(os.environ, engine_has_own=version.engine_has_switch(switch.MASTER_SWITCH))
    except SwitchError as error:
        # The plan reads the switch again, and its error becomes a reason of the spec.
        logger.error("sgl-mega-plugin: %s", error)
