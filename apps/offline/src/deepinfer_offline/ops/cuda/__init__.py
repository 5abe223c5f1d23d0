"""The kernels of `deepinfer_kernels_cuda` as providers of this engine's ops."""
