"""`context_kv`: norm, RoPE and gated write of the accepted rows' draft KV in one launch."""
