"""`accept_tail`: greedy accept of a drafted block and all its bookkeeping."""
