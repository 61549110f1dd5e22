"""The benchmark of slots: what ``sgl-mega bench`` runs and writes.

``workloads`` makes the inputs of each seam and counts their bytes, ``peers`` lists what a slot is compared
with, ``timer`` is all that touches a GPU's clock, ``runner`` puts them together, ``records`` is what comes
out, ``table`` and ``plots`` show it. Importing this package loads nothing.
"""
