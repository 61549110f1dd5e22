"""Accept, relay and commit of a dense DSpark step inside the target's verify graph.

SGLang 0.5.23 records them there for DeepSeek-V4.1 alone; every other target runs them eagerly after the graph.
``reasons`` says from a server's settings whether the fold can run, ``install`` puts ``worker``'s class where SGLang
looks for its DSpark worker, and ``epilogue`` is what the graph records. docs/engine-hooks.md lists what is hooked.
"""
