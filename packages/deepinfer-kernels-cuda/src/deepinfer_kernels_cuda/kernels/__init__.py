"""Portable Triton kernels: they compile for sm_90 and sm_100 and run in Triton's interpreter."""
