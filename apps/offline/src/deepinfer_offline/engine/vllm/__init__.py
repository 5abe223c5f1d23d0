"""DeepInfer on vLLM: the CPU platform for stock wheels and, above it, the engine that drives vLLM for the job layer."""
