"""`draft_lm_head`: base logits of a draft block, or only their argmax. Its kernels are in ``common.lm_head``."""
