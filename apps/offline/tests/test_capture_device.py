"""Recording graphs on a CUDA device: memory is shared, seen, and no more than what was set aside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from deepinfer_offline.engine.native.capture import SPARE_BYTES, Recorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH = 1 << 18  # float32 values of a row: a mebibyte
MOST = 48  # rows


def make(source: torch.Tensor, rows: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Work of three tensors of `rows` MiB at a time, the last of which it returns, with sums beside it."""

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        moved = source[:rows] + 1
        total = moved * 2
        return total - moved, total.sum(1).to(torch.bfloat16)

    return work


@torch.inference_mode()
def test_graphs_of_all_sizes_work_in_one_room_in_any_order() -> None:
    room = 3 * MOST << 20
    recorder = Recorder("cuda:0", room)
    # A process's first graph also makes the state of torch's random numbers, in a piece for small tensors.
    assert room <= recorder.taken <= room + (2 << 20)
    source = torch.arange(MOST, device="cuda").float()[:, None].expand(MOST, WIDTH).contiguous()
    recorded = {}
    for rows in (2, 3, 5, 8, 13, 21, 34, MOST, 1, 40):
        recorded[rows] = recorder.record(make(source, rows), warm_ups=1)
    assert recorder.taken <= room + SPARE_BYTES / 4, "graphs do not share their memory"
    for rows, found in recorded.items():
        assert found is not None
        graph, (values, sums) = found
        graph.replay()
        assert torch.equal(values, source[:rows] + 1), rows
        assert sums.dtype == torch.bfloat16
        assert torch.equal(sums, ((source[:rows, 0] + 1) * 2 * WIDTH).to(torch.bfloat16)), rows


@torch.inference_mode()
def test_a_graph_that_needs_more_is_not_recorded_and_takes_nothing_from_others() -> None:
    recorder = Recorder("cuda:0", 8 << 20)
    source = torch.zeros(MOST, WIDTH, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    assert recorder.record(make(source, MOST), warm_ups=0) is None
    assert recorder.taken <= recorder.limit
    assert free - torch.cuda.mem_get_info()[0] <= SPARE_BYTES + (4 << 20)
    assert torch.cuda.get_per_process_memory_fraction() == 1
    found = recorder.record(make(source, 2), warm_ups=0)
    assert found is not None
    found[0].replay()
    assert torch.equal(found[1][0], torch.ones(2, WIDTH, device="cuda"))
    assert make(source, MOST)()[0].sum() == MOST * WIDTH, "steps without a graph have their memory"
