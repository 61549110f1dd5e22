"""What the kit knows of each seam, one module a stage. Read by ``generate`` and ``runner``."""

from sgl_mega_plugin.conformance.seam_kits import commit, draft, forward, glue, head, verify_accept
from sgl_mega_plugin.conformance.seam_kits.kit import SeamKit

__all__ = ["SEAM_KITS", "SeamKit"]

#: Every seam's kit, in the order of the stages.
SEAM_KITS: dict[str, SeamKit] = {
    kit.seam: kit for kit in (*draft.KITS, *verify_accept.KITS, *glue.KITS, *commit.KITS, *forward.KITS, *head.KITS)
}
