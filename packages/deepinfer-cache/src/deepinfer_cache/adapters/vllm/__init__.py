"""deepinfer-cache inside vLLM: a KV connector over host memory and a directory that later runs share."""
