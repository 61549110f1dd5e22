"""SGLang megakernel plugin: slots that shorten a DSpark decode step.

Importing this package does no work. SGLang enters through
``sgl_mega_plugin.engine.entry:register``, people through the ``sgl-mega`` command.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
