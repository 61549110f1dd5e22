"""Frequency tests of the seams that draw tokens: does a slot have the law that its seam states?

A slot that equals its reference on the same noise still has the wrong law if both make the same mistake. So the
draws of each are counted, and every count is held to five standard deviations of its binomial law. The laws are
computed here from the seam's text, in fp64. Called by the runner.
"""

from sgl_mega_plugin.conformance.laws.draft_block import DRAFT_BLOCK
from sgl_mega_plugin.conformance.laws.sampled_accept import SAMPLED_ACCEPT
from sgl_mega_plugin.conformance.laws.tally import Law

__all__ = ["LAWS", "Law"]

#: The frequency tests by seam.
LAWS: dict[str, tuple[Law, ...]] = {"draft_block": DRAFT_BLOCK, "sampled_accept": SAMPLED_ACCEPT}
