from types import SimpleNamespace

import pytest
import torch
from deepinfer_kernels_cuda import mhc


class Launches:
    """Stands for the kernel: as many blocks and clusters of two at once as asked for; keeps how it is launched."""

    def __init__(self, blocks: int, pairs: int) -> None:
        self.blocks, self.pairs, self.seen = blocks, pairs, []

    def resident(self, device: torch.device) -> int:
        return self.blocks

    def clusters(self, device: torch.device, size: int) -> int:
        assert size == 2
        return self.pairs

    def __call__(self, grid, *arguments, device, cluster=1) -> None:
        self.seen.append((grid, cluster))


def use(monkeypatch, kernel: Launches) -> None:
    monkeypatch.setattr(mhc, "_row_kernel", lambda groups: kernel)
    monkeypatch.setattr(mhc, "device_arch", lambda device: 90)
    monkeypatch.setattr(mhc, "native_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    mhc._teams.cache_clear()


@pytest.fixture(autouse=True)
def forget():
    yield
    mhc._teams.cache_clear()


@pytest.mark.parametrize(
    ("tokens", "teams", "cluster"), [(1, 1, 1), (8, 1, 1), (9, 2, 2), (17, 3, 1), (64, 8, 2), (1000, 8, 2)]
)
def test_an_even_number_of_teams_runs_in_pairs(monkeypatch, tokens, teams, cluster) -> None:
    """A block of a pair waits for the other to begin, and a row's 16 blocks for each other: none may be left over."""
    kernel = Launches(blocks=132, pairs=66)
    use(monkeypatch, kernel)
    d = 1024
    one = {"pre": torch.rand(tokens, 4), "norm_weight": torch.ones(d, dtype=torch.bfloat16), "norm_eps": 1e-6, "iterations": 20,
           "eps": 1e-6, "output": torch.rand(tokens, d).bfloat16(), "post": torch.rand(tokens, 4),
           "comb": torch.rand(tokens, 4, 4)}  # fmt: skip
    mhc.mhc_step(torch.rand(tokens, 4, d).bfloat16(), torch.rand(24, 4 * d), torch.rand(24), torch.rand(3), **one)
    assert kernel.seen == [((teams * 16, 1, 1), cluster)]


@pytest.mark.parametrize(("blocks", "pairs", "teams"), [(132, 66, 8), (132, 60, 7), (16, 0, 0), (100, 66, 6)])
def test_teams_all_fit_the_device_in_pairs_too(monkeypatch, blocks, pairs, teams) -> None:
    use(monkeypatch, Launches(blocks, pairs))
    assert mhc._teams(torch.device("cpu"), 2) == teams
