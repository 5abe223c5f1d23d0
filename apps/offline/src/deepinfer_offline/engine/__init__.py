"""Engines: what runs requests. `base` is the contract, `native` is DeepInfer's own engine, `vllm` drives vLLM."""
