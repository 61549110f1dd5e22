"""Which SGLang this package is written for: the one place that states a version.

``engine/version.py`` compares what is installed with it, ``switch.py`` ties the engine's switches to it.
"""

from __future__ import annotations

#: SGLang releases that the binding was written and tested against.
ENGINE_VERSIONS = frozenset({"0.5.23"})
#: The version of SGLang's megakernel contract that the specs are written against.
API_VERSION = 1
