"""The kernel of `target_step` on a CPU: its own source, with the primitives of ``platform.cuh`` instead of a GPU's."""
