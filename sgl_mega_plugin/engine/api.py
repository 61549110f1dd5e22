"""SGLang's megakernel contract in the version that the specs are written against.

Importing this under another version raises, and SGLang shows the message as the reason why the spec does
not import: another version's contract may lack or change the names below.
"""

from __future__ import annotations

from sgl_mega_plugin.engine import version

version.require_api()

from sglang.kernels.plugin_kernels.nvidia.spec import (  # noqa: E402  the version is checked first
    BuildContext,
    Feature,
    MegakernelSpec,
    Numerics,
    NumericsKind,
    Requirements,
    Step,
)

__all__ = ["BuildContext", "Feature", "MegakernelSpec", "Numerics", "NumericsKind", "Requirements", "Step"]
