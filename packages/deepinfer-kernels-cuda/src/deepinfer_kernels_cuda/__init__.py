"""Triton kernels for DeepSig V4.1 and Llama-class models on NVIDIA GPUs."""
