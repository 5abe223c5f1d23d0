"""DeepSig V4.1 (`deepseek_v41`, `deepsig_v41`)."""
