"""`step_inputs`: positions, cache locations and draft inputs of a step in one launch."""
