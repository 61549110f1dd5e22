"""`markov`: pick the tokens of a draft block, each corrected by the token before it."""
