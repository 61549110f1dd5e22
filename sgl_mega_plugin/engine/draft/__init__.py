"""Slots in place of a dense draft's parts on SGLang: its forward over a block, and the sampler that makes tokens of it.

``block_forward`` runs a slot of the seam ``draft_forward``, ``sampler`` one of ``draft_block``, ``head`` one of
``draft_logits``; ``reasons`` says from a server's settings whether the first can run.
"""
