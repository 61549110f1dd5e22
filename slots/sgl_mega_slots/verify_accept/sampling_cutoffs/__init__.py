"""`sampling_cutoffs`: top-k, top-p and min-p of each target row as one logit, below which nothing has mass."""
