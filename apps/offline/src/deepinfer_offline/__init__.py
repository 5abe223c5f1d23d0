"""DeepInfer: the offline LLM inference engine."""
