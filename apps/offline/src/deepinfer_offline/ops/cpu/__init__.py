"""C kernels for processors with AVX-512 BF16, compiled once for the machine they run on."""
