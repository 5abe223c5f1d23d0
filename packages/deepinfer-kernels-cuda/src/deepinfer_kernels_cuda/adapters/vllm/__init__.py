"""deepinfer-kernels-cuda inside vLLM: `DEEPINFER_KERNELS=rms_norm`; `python -m` this package lists what is replaced."""
