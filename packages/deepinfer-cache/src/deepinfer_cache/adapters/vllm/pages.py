"""Pages of one cache group as byte records, over the tensors that vLLM hands to a worker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class GroupPages:
    """Reads and writes whole pages: the block's bytes in every layer, one layer behind the other.

    Args:
        layers: the group's cache tensors [blocks * parts, ...]; a backend may split each block into equal parts.
        num_blocks: blocks that vLLM manages.

    Raises:
        ValueError: a tensor's first dimension does not count blocks.
    """

    def __init__(self, layers: Sequence[torch.Tensor], num_blocks: int) -> None:
        for layer in layers:
            if layer.shape[0] % num_blocks:
                raise ValueError(f"a KV cache tensor has shape {tuple(layer.shape)}, which is not {num_blocks} blocks")
        self._layers = [(layer, layer.shape[0] // num_blocks) for layer in layers]
        self._widths = [parts * layer[0].numel() * layer.element_size() for layer, parts in self._layers]
        self.page_bytes = sum(self._widths)

    def read(self, blocks: Sequence[int]) -> np.ndarray:
        """Records of blocks, uint8 [n, page_bytes]."""
        found = []
        for (layer, parts), width in zip(self._layers, self._widths, strict=True):
            data = layer[_rows(blocks, parts)].contiguous()
            found.append(data.view(-1).view(torch.uint8).view(len(blocks), width).cpu())
        return torch.cat(found, 1).numpy()

    def write(self, blocks: Sequence[int], records: np.ndarray) -> None:
        """Put records, uint8 [n, page_bytes], into blocks."""
        data, at = torch.from_numpy(records), 0
        for (layer, parts), width in zip(self._layers, self._widths, strict=True):
            rows = _rows(blocks, parts)
            part = data[:, at : at + width].contiguous().view(-1).view(layer.dtype).view(len(rows), *layer.shape[1:])
            layer[rows] = part.to(layer.device)
            at += width


def _rows(blocks: Sequence[int], parts: int) -> list[int]:
    return [block * parts + part for block in blocks for part in range(parts)]
