"""Print what the adapter replaces in the vLLM that is installed, on this machine, under the present `DEEPINFER_KERNELS`."""

from __future__ import annotations

import sys

from deepinfer_kernels_cuda.adapters.vllm import plugin

if __name__ == "__main__":
    for decision in plugin.decisions():
        what = f"replaces {decision.layer}" if decision.layer else "no"
        sys.stdout.write(f"{decision.op:<20} {what:<18} {decision.reason}\n")
