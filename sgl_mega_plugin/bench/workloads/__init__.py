"""The inputs of each seam at a size, and the bytes that a call on them cannot avoid.

Seam-driven: any distribution's slot is timed on the workload of its seam. Random data, never zeros, and the
same on every run; what is as large as a model's weights or its KV pool is shared by the input sets of a size.
Used by ``runner``.
"""

from sgl_mega_plugin.bench.workloads import commit, draft, forward, glue, head, sizes, verify_accept
from sgl_mega_plugin.bench.workloads.workload import Source, Workload, slot_vocab

__all__ = ["WORKLOADS", "Source", "Workload", "sizes", "slot_vocab"]

#: The workload of every seam, in the order of a step.
WORKLOADS: dict[str, Workload] = {
    workload.seam: workload
    for workload in (
        *glue.WORKLOADS,
        *draft.WORKLOADS,
        *verify_accept.WORKLOADS,
        *commit.WORKLOADS,
        *forward.WORKLOADS,
        *head.WORKLOADS,
    )
}
