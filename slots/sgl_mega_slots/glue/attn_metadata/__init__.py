"""`attn_metadata`: lengths, running sums, page tables and slot lists of a step's attention in one launch."""
