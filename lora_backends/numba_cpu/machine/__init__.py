"""What kernels are written in: vector operations, how they compile, the CPU and its threads."""
