"""What a gated or an RNN head does to the factors of `markov_w2`."""
