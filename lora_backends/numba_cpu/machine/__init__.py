"""The language of the kernels: vector operations, their compilation, the CPU and its threads."""
