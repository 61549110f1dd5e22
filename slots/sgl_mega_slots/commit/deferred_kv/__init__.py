"""`deferred_kv`: the staged context KV written and disarmed in one launch."""
