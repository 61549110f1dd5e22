"""Compiler options that every launch of this package passes."""

#: Each product and sum is rounded on its own, as in the references. Stated, for Triton's default is about to change.
ENABLE_FP_FUSION = False
