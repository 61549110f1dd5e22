"""Where the Triton slots of this package run. Read by their specs; imports nothing."""

#: Hopper, Blackwell (data centre and workstation), and a CPU by the reference or the interpreter.
TRITON_ISAS = frozenset({"sm_90", "sm_100", "sm_103", "sm_120", "cpu"})
