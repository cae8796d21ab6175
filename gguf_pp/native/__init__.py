"""C kernels of the CPU, and whether they are there. No torch."""
