"""`histories`: the last token ids of each request, advanced by a commit, in one launch."""
