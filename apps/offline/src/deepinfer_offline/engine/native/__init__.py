"""DeepInfer's own engine on torch: the loop, the runner, and what they share."""
