"""`draft_step`: a dense draft's forward over its block, by the kernel of `target_step`."""
