"""`blockwise_rejection`: accept of a drafted block by rejection sampling, greedy rows among sampled ones."""
