"""Paged attention over a whole batch in plain torch: rows of like size are attended at once.

Knows nothing of vLLM. The plan of a step is made once and used by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

MAX_PADDING = 1.25  # a group may attend at most this many times the keys its rows really have
MAX_SCORES = 1 << 24  # query x key pairs a head in one group: bounds the memory of its mask


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are attended in one call.

    Attributes:
        blocks: int64 [rows, num_blocks], the blocks to read, padded with each row's first block.
        queries: int64 [rows, max_query], index of each query in the flattened batch, padding repeats the last one.
        query_positions: int64 [rows, max_query], position of each query in its sequence.
        keys: int64 [rows], number of valid keys.
        valid: bool [rows, max_query], False for padding queries; None when there is none.
    """

    blocks: torch.Tensor
    queries: torch.Tensor
    query_positions: torch.Tensor
    keys: torch.Tensor
    valid: torch.Tensor | None
    masks: dict[tuple[int, bool], torch.Tensor] = field(default_factory=dict)

    def mask(self, block_size: int, window: int, causal: bool) -> torch.Tensor:
        """Return bool [rows, max_query, keys]: True where a query may look. `window` <= 0 means no window."""
        key = (window, causal)
        if key not in self.masks:
            at = torch.arange(self.blocks.shape[1] * block_size)
            seen = at[None, None, :] < self.keys[:, None, None]
            if causal:
                seen = seen & (at[None, None, :] <= self.query_positions[:, :, None])
            if window > 0:
                seen = seen & (at[None, None, :] > self.query_positions[:, :, None] - window)
            self.masks[key] = seen.expand(-1, self.queries.shape[1], -1)
        return self.masks[key]


def plan_groups(
    query_starts: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> list[RowGroup]:
    """Group the rows of a batch by query length and sequence length.

    Args:
        query_starts: int [rows + 1], first query of each row in the flattened batch.
        seq_lens: int [rows], keys of each row, the queries of this step included.
        block_table: int [>= rows, max_blocks].
        block_size: tokens a block.
    """
    starts, lens = query_starts.tolist(), seq_lens.tolist()
    rows = [r for r in range(len(lens)) if starts[r + 1] > starts[r]]
    rows.sort(key=lambda r: (starts[r + 1] - starts[r], lens[r]))
    groups: list[RowGroup] = []
    begin = 0
    while begin < len(rows):
        end, work, longest = begin, 0, 0
        while end < len(rows):
            query, keys = starts[rows[end] + 1] - starts[rows[end]], lens[rows[end]]
            work, longest = work + query * keys, max(longest, keys)
            padded = (end + 1 - begin) * query * longest  # sorted: no earlier row has more queries
            if end > begin and (padded > MAX_PADDING * work or padded > MAX_SCORES):
                break
            end += 1
        groups.append(_group(rows[begin:end], starts, lens, block_table, block_size))
        begin = end
    return groups


def _group(rows: list[int], starts: list[int], lens: list[int], block_table: torch.Tensor, block_size: int) -> RowGroup:
    counts = torch.tensor([starts[r + 1] - starts[r] for r in rows])
    keys = torch.tensor([lens[r] for r in rows])
    width = int(counts.max())
    offset = torch.arange(width)[None, :]
    clipped = torch.minimum(offset, counts[:, None] - 1)
    queries = torch.tensor([starts[r] for r in rows])[:, None] + clipped
    needed = -(-keys // block_size)
    column = torch.arange(int(needed.max()))[None, :]
    blocks = block_table[rows, : column.shape[1]].long()
    blocks = torch.where(column < needed[:, None], blocks, blocks[:, :1])
    valid = None if bool((counts == width).all()) else offset < counts[:, None]
    return RowGroup(blocks, queries, (keys - counts)[:, None] + clipped, keys, valid)


def gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Copy blocks together: [num_blocks, heads, block, d], int64 [rows, n] -> [rows, heads, n * block, d]."""
    _, heads, block, d = cache.shape
    index = blocks[:, None, :] * heads + torch.arange(heads)[None, :, None]
    picked = cache.reshape(-1, block * d).index_select(0, index.reshape(-1))
    return picked.view(blocks.shape[0], heads, blocks.shape[1] * block, d)


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    groups: list[RowGroup],
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    causal: bool = True,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend every query of the batch to its sequence's cached keys and write the result into `out`.

    Args:
        query: [tokens, heads, d].
        cache: [num_blocks, kv_heads, block, 2 * d], keys then values in the last dimension.
        groups: from `plan_groups` for this batch.
        out: [tokens, heads, d], written for every query of the groups.
        window: keys a query may see, itself included; <= 0 for all.
        softcap: scores become softcap * tanh(score / softcap); 0 for off.
        sinks: [heads] logits that take part in the softmax without a value, or None.
    """
    heads, d = query.shape[1:]
    kv_heads, block_size = cache.shape[1:3]
    for group in groups:
        rows, width = group.queries.shape
        q = query[group.queries.view(-1)].view(rows, width, kv_heads, heads // kv_heads, d)
        q = q.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, d)  # queries of a KV head are one matrix
        kv = gather(cache, group.blocks)
        mask = group.mask(block_size, window, causal)[:, None, :, :].repeat(1, 1, heads // kv_heads, 1)
        if softcap or sinks is not None:
            o = _attend_exact(q, kv, mask, scale, softcap, sinks, width)
        else:
            o = F.scaled_dot_product_attention(q, kv[..., :d], kv[..., d:], attn_mask=mask, scale=scale)
        o = o.view(rows, kv_heads, heads // kv_heads, width, d).permute(0, 3, 1, 2, 4).reshape(-1, heads, d)
        if group.valid is None:
            out[group.queries.view(-1)] = o
        else:
            out[group.queries[group.valid]] = o[group.valid.view(-1)]


def _attend_exact(
    q: torch.Tensor,
    kv: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    width: int,
) -> torch.Tensor:
    """Attention with a soft cap or sinks, which torch's fused kernel does not know. Softmax in float32."""
    rows, kv_heads, _, d = q.shape
    scores = torch.matmul(q, kv[..., :d].transpose(-1, -2)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.float().view(1, kv_heads, -1, 1).expand(rows, -1, -1, width).reshape(rows, kv_heads, -1, 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(q.dtype), kv[..., d:])


def insert(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys and values [tokens, kv_heads, d] to slots (block * block_size + offset), negative slots excepted."""
    block_size = cache.shape[2]
    slots = slots[: key.shape[0]]
    new = torch.cat([key, value], -1)
    if bool((slots < 0).any()):
        keep = slots >= 0
        slots, new = slots[keep], new[: slots.shape[0]][keep]
    cache[slots // block_size, :, slots % block_size] = new[: slots.shape[0]].to(cache.dtype)
