"""deepinfer-structured inside vLLM: start it with `DEEPINFER_STRUCTURED=1`, and every constraint goes through our router."""
