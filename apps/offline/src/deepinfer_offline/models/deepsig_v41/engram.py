"""The n-gram hash of Engram: token map, prime tables, multipliers, and the ids before a chunk. `v41-model` section 2.8."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.rows import StepRows
from deepinfer_offline.ops import deepsig as ops

if TYPE_CHECKING:
    from deepinfer_offline.models.base import ForwardBatch

_SEED_STEP = 10007  # layer seeds of the multipliers, as released
_LONE_SPACE = "\ue000"  # stands for a text that is one space, while the ends are stripped


def compressed_token_map(tokenizer: Any) -> np.ndarray:
    """Map token ids to compressed ids: tokens whose normalised text is equal share one, numbered by first appearance.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.

    Returns:
        int64 [tokens, added ones included].
    """
    from tokenizers import Regex, normalizers

    normalise = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    ).normalize_str
    ids: dict[str, int] = {}
    mapped = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        # A token that is part of a character has no text of its own: its vocabulary string stands for it.
        key = tokenizer.id_to_token(token) if "\ufffd" in text else normalise(text) or text
        mapped.append(ids.setdefault(key, len(ids)))
    return np.asarray(mapped, dtype=np.int64)


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    return n % 2 != 0 and all(n % d for d in range(3, math.isqrt(n) + 1, 2))


def bucket_primes(config: V41Config) -> list[list[int]]:
    """Bucket sizes by Engram layer, n-gram size major: distinct primes from `engram_vocab_size` on, no prime used twice."""
    seen: set[int] = set()
    tables = []
    for _ in config.engram_layer_ids:
        table = []
        for _ in range(config.engram_max_ngram_size - 1):
            current = config.engram_vocab_size - 1
            for _ in range(config.engram_n_heads):
                current += 1
                while current in seen or not _is_prime(current):
                    current += 1
                seen.add(current)
                table.append(current)
        tables.append(table)
    return tables


@dataclass(frozen=True)
class HashTable:
    """The hash of one Engram layer: multipliers int64 [n], primes and offsets int64 [(n - 1) * heads]."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor


class EngramHash:
    """Turns token ids into table rows.

    Args:
        config: of the model.
        token_map: int64 [tokens], from `compressed_token_map`.
        device: of the tensors.

    Raises:
        EngineStartError: the token map or the tables do not have the sizes that the configuration states.
    """

    def __init__(self, config: V41Config, token_map: np.ndarray, device: str = "cpu") -> None:
        size = int(token_map.max()) + 1
        if size != config.engram_compressed_vocab_size:
            raise EngineStartError(
                f"the tokenizer has {size} distinct normalised tokens, but engram_compressed_vocab_size is "
                f"{config.engram_compressed_vocab_size}: Engram hashes would be wrong; is this the model's own tokenizer?"
            )
        self.config = config
        # Ids that the tokenizer does not know (padding rows of the embedding) hash like the pad token.
        pad = int(token_map[config.engram_pad_token_id])
        full = np.full(max(config.vocab_size, len(token_map)), pad, dtype=np.int64)
        full[: len(token_map)] = token_map
        self.token_map = torch.from_numpy(full).to(device)
        self.pad = pad
        bound = max(1, np.iinfo(np.int64).max // size // 2)
        self.tables = tuple(
            self._table(layer, primes, rows, bound).to_device(device)
            for layer, primes, rows in zip(
                config.engram_layer_ids, bucket_primes(config), config.engram_num_embeddings, strict=True
            )
        )

    def _table(self, layer: int, primes: list[int], rows: int, bound: int) -> _HostTable:
        if sum(primes) > rows:
            raise EngineStartError(
                f"Engram layer {layer} hashes into {sum(primes)} rows, but engram_num_embeddings gives it {rows}"
            )
        draws = np.random.default_rng(_SEED_STEP * layer).integers(
            0, bound, size=self.config.engram_max_ngram_size, dtype=np.int64
        )
        return _HostTable(draws * 2 + 1, np.asarray(primes), np.cumsum([0, *primes[:-1]]))

    def rows(self, table: int, history: Tensor) -> Tensor:
        """Table rows int64 [T, heads in all] of Engram table number `table`; `history` from `token_history`."""
        entry = self.tables[table]
        return ops.engram_rows(history, entry.multipliers, entry.primes, entry.offsets)

    def token_history(self, batch: ForwardBatch, step: StepRows) -> Tensor:
        """Compressed ids of each row's token and of those before it, newest first: int64 [T, n].

        Ids before the step's first row come from the token buffer: the true ones, also below a replay start.
        """
        n = self.config.engram_max_ngram_size
        back = np.arange(n)
        rows = np.arange(step.count)[:, None] - back
        positions = step.host_positions[:, None] - back
        in_step = positions >= step.first[step.owner][:, None]
        exists = step.tensor(positions >= 0)
        slots = step.tensor(np.broadcast_to(step.slots[step.owner][:, None], positions.shape))
        earlier = batch.tokens[slots, step.tensor(np.maximum(positions, 0))].to(torch.int64)
        own = batch.token_ids.to(torch.int64)[step.tensor(np.maximum(rows, 0))]
        ids = torch.where(step.tensor(in_step), own, earlier)
        # Positions that do not exist may hold anything in the buffer.
        return torch.where(exists, self.token_map[ids.masked_fill(~exists, 0)], self.pad)

    def buffered_history(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """The same from the token buffer alone, which also holds the step's own tokens: no index is made on the host.

        Args:
            tokens: int32 [slots, capacity].
            slots: int [T], of each row.
            positions: int64 [T].
        """
        back = torch.arange(self.config.engram_max_ngram_size, device=positions.device)
        places = positions.unsqueeze(1) - back
        ids = tokens[slots.long().unsqueeze(1), places.clamp_min(0)].to(torch.int64)
        exists = places >= 0
        return torch.where(exists, self.token_map[ids.masked_fill(~exists, 0)], self.pad)


@dataclass(frozen=True)
class _HostTable:
    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray

    def to_device(self, device: str) -> HashTable:
        arrays = (self.multipliers, self.primes, self.offsets)
        return HashTable(*(torch.from_numpy(a.astype(np.int64)).to(device) for a in arrays))
