"""deepinfer-sched inside vLLM: `--scheduler-cls deepinfer_sched.adapters.vllm.scheduler.PrefixScheduler`."""
