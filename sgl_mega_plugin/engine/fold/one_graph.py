"""Several captured CUDA graphs as the child nodes of one, so that a step is one launch.

torch has no call for it, so this uses ``cuda.bindings``, which SGLang depends on. A graph can be a child only if its
``cudaGraph_t`` was kept at capture: :func:`keeping_graphs` has SGLang's own captures do so. Used by ``steady``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch


class GraphError(RuntimeError):
    """A call of the CUDA runtime that failed, with its error."""


@contextmanager
def keeping_graphs() -> Iterator[None]:
    """While this is open, ``torch.cuda.CUDAGraph()`` keeps what it captures beside what it launches."""
    made = torch.cuda.CUDAGraph

    def kept(*args: Any, **kwargs: Any) -> Any:
        return made(*args, **({"keep_graph": True} | kwargs))

    torch.cuda.CUDAGraph = kept  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.cuda.CUDAGraph = made  # type: ignore[misc]


class OneGraph:
    """Captured graphs, launched together one after the other.

    The children's memory is theirs: whoever holds this must keep them. They run as they were captured, without
    torch's hooks around a replay; none of them may draw from a generator of torch.
    """

    def __init__(self, graphs: Sequence[Any]) -> None:
        """``graphs``: ``torch.cuda.CUDAGraph`` whose graph was kept, in order. Raises :class:`GraphError`."""
        self._runtime = import_module("cuda.bindings.runtime")
        self._children = tuple(graphs)
        self._graph = self._call("cudaGraphCreate", 0)
        before: list[Any] = []
        for graph in graphs:
            child = self._runtime.cudaGraph_t(graph.raw_cuda_graph())
            before = [self._call("cudaGraphAddChildGraphNode", self._graph, before, len(before), child)]
        self._launched = self._call("cudaGraphInstantiate", self._graph, 0)

    def launch(self) -> None:
        """On the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        self._call("cudaGraphLaunch", self._launched, self._runtime.cudaStream_t(stream))

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of a call, after its error code."""
        error, *found = getattr(self._runtime, name)(*arguments)
        if int(error) != 0:
            raise GraphError(f"{name}: {error!r}")
        return found[0] if found else None
