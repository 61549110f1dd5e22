"""What SGLang's log says of the engine-backed slots: its lines (``lines``), a file (``read``), a worker (``watch``).

A variable asks for an optimization. Whether SGLang takes it depends on the model and the settings, and SGLang says so
in its log alone, or not at all. Nothing here imports torch or SGLang.
"""
