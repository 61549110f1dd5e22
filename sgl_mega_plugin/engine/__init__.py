"""The binding to SGLang: the only package here that imports the engine.

``entry`` is what SGLang calls in each of its processes, ``specs`` what it imports when one of the
``families`` is served, ``version`` the one module that knows an engine's version. ``host`` reads the
server's settings and ``planning`` makes the plan from them. ``draft`` and ``target`` run slots in place of the models'
forwards and of the draft's sampler, ``fold`` brings the rest of a step into the verify graph.
"""
