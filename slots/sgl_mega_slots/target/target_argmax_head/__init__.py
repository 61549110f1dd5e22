"""`target_argmax_head`: the target's LM head with each row's argmax. Its kernels are in ``common.lm_head``."""
