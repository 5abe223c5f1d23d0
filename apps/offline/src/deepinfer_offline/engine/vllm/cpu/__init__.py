"""A vLLM platform plugin: vLLM's stock CUDA wheel on a machine without an accelerator, in plain torch."""
