"""Print what the adapter replaces in a vLLM that is installed, on this machine, under the present `DEEPINFER_KERNELS`."""

from __future__ import annotations

import sys

from deepinfer_kernels_cuda.adapters.vllm import plugin


def main() -> int:
    """Print one line an op; returns 2 where `DEEPINFER_KERNELS` names what cannot be asked for."""
    try:
        decisions = plugin.decisions()
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for decision in decisions:
        what = f"replaces {decision.layer}" if decision.layer else "no"
        sys.stdout.write(f"{decision.op:<20} {what:<18} {decision.reason}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
