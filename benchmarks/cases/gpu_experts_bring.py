"""`gpu_experts_walk.py` with the build whose spare warps bring the rows of tokens during the walk."""

from __future__ import annotations

import functools
import sys

import gpu_experts_walk
import torch
from deepinfer_kernels_cuda import experts
from deepinfer_kernels_cuda.native import NativeKernel


@functools.lru_cache
def kernel(walk: experts.Walk, entry: str) -> NativeKernel:
    if entry == "place_rows":
        return NativeKernel("experts_bring.cu", entry, "PiPPPPPPPiii", threads=256, defines=walk.macros)
    threads = 128 * walk.groups + 128
    return NativeKernel("experts_bring.cu", entry, "PqPiPPPqqPiPPPPPPiiiiiiif", threads=threads, shared=walk.shared,
                        defines=walk.macros)  # fmt: skip


def run_walk(x, ids, weights, packed, order, offsets, limit, walk=None) -> torch.Tensor:
    pairs, count, up, down = ids.numel(), packed.count, packed.gate_up, packed.down
    walk = walk or (experts.WIDE if pairs > experts._WIDE_PAIRS * count else experts.NARROW)
    device, row_tiles = x.device, walk.groups * walk.tiles
    (up_n, up_k), (down_n, down_k) = up.codes.shape[1:3], down.codes.shape[1:3]
    padded = (pairs + 8 * count + 7) // 8 * 8 + walk.tokens
    plane, most = 128 * padded, count + pairs // walk.tokens + 1
    integers = torch.empty(2, padded, dtype=torch.int32, device=device)
    weight = torch.empty(padded, dtype=torch.float32, device=device)
    plan = torch.empty(4 + 6 * most, dtype=torch.int32, device=device)
    rows = torch.empty(2 * up_k * plane, dtype=torch.uint8, device=device)
    hidden = torch.empty(2 * down_k * plane, dtype=torch.uint8, device=device)
    kernel(walk, "place_rows")(
        (1 + -(-pairs // 256), 1, 1),
        ids.data_ptr(), ids.element_size(), order.data_ptr(), offsets.data_ptr(), weights.data_ptr(), integers[0].data_ptr(),
        integers[1].data_ptr(), weight.data_ptr(), plan.data_ptr(), most, count, ids.shape[1], device=device,
    )  # fmt: skip
    blocks = [-(-n // (row_tiles * walk.cluster)) for n in (max(up_n, 4 * down_k), down_n)]
    grid = (experts._processors(device) // walk.cluster * walk.cluster, 1, 1)
    parts = torch.empty(pairs, down.rows, dtype=x.dtype, device=device)
    for entry in ("walk_both",) if walk.both else ("walk_up", "walk_down"):
        kernel(walk, entry)(
            grid,
            x.data_ptr(), x.stride(0), integers[0].data_ptr(), up.columns, rows.data_ptr(), hidden.data_ptr(),
            parts.data_ptr(), parts.stride(0), plane, plan.data_ptr(), most, integers[1].data_ptr(), weight.data_ptr(),
            up.codes.data_ptr(), up.scales.data_ptr(), down.codes.data_ptr(), down.scales.data_ptr(), blocks[0], up_n, up_k,
            blocks[1], down.rows, down_n, down_k, float(limit), device=device, cluster=walk.cluster,
        )  # fmt: skip
    return parts


if __name__ == "__main__":
    experts._run_walk = run_walk
    gpu_experts_walk.run(sys.argv[1:])
