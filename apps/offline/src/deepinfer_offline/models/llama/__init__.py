"""The Llama family: Llama 2/3, SmolLM2, Qwen2/2.5, Qwen3 dense."""
