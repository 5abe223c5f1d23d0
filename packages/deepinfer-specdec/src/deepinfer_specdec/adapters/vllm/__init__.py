"""deepinfer-specdec inside vLLM: proposers, and calibrated, planned verification for drafters of vLLM's own."""
