"""`target_step`: a dense target's verify forward as one persistent CUDA C++ kernel."""
