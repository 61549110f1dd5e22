"""The LM head of `draft_lm_head` and `target_argmax_head`: products, and the argmax of each row on the way."""
