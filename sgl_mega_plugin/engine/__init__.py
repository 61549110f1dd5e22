"""The binding to SGLang: the only package here that imports the engine.

``entry`` is what SGLang calls in each of its processes, ``specs`` what it imports when one of the
``families`` is served, ``version`` the one module that knows an engine's version. ``host`` reads the
server's settings, ``planning`` makes the plan from them, and ``draft_sampler`` runs the slot of the
seam ``draft_block`` inside the draft's CUDA graph.
"""
