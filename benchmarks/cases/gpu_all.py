"""Every GPU case in one process: `python benchmarks/cases/gpu_all.py`, results as JSON lines too."""

from __future__ import annotations

import gpu_attention
import gpu_experts
import gpu_ops
import torch
from gpu_bench import Recorder


def main() -> None:
    """Run attention, experts and streaming ops, each with ceilings measured just before."""
    for name, module in (("attention", gpu_attention), ("experts", gpu_experts), ("ops", gpu_ops)):
        torch.manual_seed(0)
        recorder = Recorder(name)
        module.run(recorder)
        recorder.save()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
