"""deepinfer-specdec inside vLLM: n-gram and suffix drafts through vLLM's custom proposer."""
