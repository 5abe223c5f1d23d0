"""Attention, experts and streaming ops of a GPU in one process, each with ceilings measured just before."""

from __future__ import annotations

import argparse
import sys

import gpu_attention
import gpu_experts
import gpu_ops
import torch


def run(argv: list[str]) -> int:
    """Each part prints its lines and saves them. Returns 1 if a line of any failed."""
    argparse.ArgumentParser(prog="deepinfer bench gpu-all", description=__doc__).parse_args(argv)
    status = 0
    for part in (gpu_attention, gpu_experts, gpu_ops):
        status |= part.run([])
        torch.cuda.empty_cache()
    return status


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
