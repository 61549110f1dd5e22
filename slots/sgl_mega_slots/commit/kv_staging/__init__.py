"""`kv_staging`: what a commit needs, kept until the next draft, in one launch."""
