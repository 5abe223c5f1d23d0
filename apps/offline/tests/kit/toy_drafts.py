"""The toy model with a block draft, for the loop that verifies drafts ahead of the host.

The draft knows the model's own distribution and is misled at some places, which a hash of the text chooses: rows accept none,
some or all of a block. Its context is what `forward` left in the cache, read through the block tables it is given.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from deepinfer_offline.engine.base import Request
from deepinfer_offline.engine.native.drafting import make_speculation
from deepinfer_offline.engine.native.engine import NativeEngine
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.models.base import DraftChooser, DraftedBlocks, ForwardBatch
from toy_engine import BLOCK, PRIME, ToyModel, ask, check, make_engine, random_request, run, toy_logits

WIDTH = 5


def hash_step(value: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`toy_engine.prefix_hash`, one token further."""
    return (value * 31_337 + tokens + 1) % PRIME


class DraftingToy(ToyModel):
    """See the module's docstring."""

    draft_group = "kv"
    draft_width = WIDTH

    def start_drafting(self) -> None:
        """The cached state is the context."""

    def draft_blocks(
        self,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        cache: torch.Tensor,
        choose: DraftChooser,
        longest: int,
    ) -> DraftedBlocks:
        value = hash_step(self._read(positions - 1, tables, cache, longest), anchors)
        tokens, confidence = [], []
        for column in range(WIDTH):
            misled = value % 4 == 0
            confidence.append(torch.where(misled, -1.5, 1.5) + (value % 7).float() / 10)
            tokens.append(choose(toy_logits(torch.where(misled, value + 1, value)), column))
            value = hash_step(value, tokens[-1])
        return DraftedBlocks(torch.stack(tokens, 1), torch.stack(confidence, 1))

    def _read(self, last: torch.Tensor, tables: torch.Tensor, cache: torch.Tensor, longest: int) -> torch.Tensor:
        """Hash of each row's cached tokens up to position `last`."""
        value = torch.full_like(last, 17)
        for place in range(longest):
            column = min(place // BLOCK, tables.shape[1] - 1)
            token = cache[tables[:, column].long() * BLOCK + place % BLOCK]
            value = torch.where(place <= last, hash_step(value, token), value)
        return value


class BoundsToy(DraftingToy):
    """The same from the device's tensors alone: of the host's batch it takes the longest row."""

    takes_bounds = True

    def forward(self, batch: ForwardBatch, cache: torch.Tensor) -> torch.Tensor:
        table, positions = batch.block_tables["kv"].long(), batch.positions
        rows = torch.searchsorted(batch.query_starts[1:].long(), torch.arange(len(positions)), right=True)
        places = table[rows, positions // BLOCK] * BLOCK + positions % BLOCK
        kept = positions >= batch.write_floors[rows]
        cache[torch.where(kept, places, 0)] = torch.where(kept, batch.token_ids, -1)  # block 0 is nobody's
        wanted = batch.logit_rows
        longest = int(batch.host.seq_lens.max())
        return self._read(positions[wanted], table[rows[wanted]], cache, longest)[:, None]


def make_drafting_engine(*, kind: type[ToyModel] = DraftingToy, **sizes: Any) -> NativeEngine:
    """A toy engine that drafts; speculation is as the engine makes it, and undecided."""
    engine = make_engine(kind=kind, **sizes)
    parts = engine._parts
    options = EngineOptions(engine="native", speculative="dspark", async_scheduling=parts.ahead > 1)
    speculation = make_speculation(options, parts.runner, parts.scheduler, parts.cache, parts.runner._sample)
    engine._parts = replace(parts, speculation=speculation)
    return engine


class Cycle:
    """A grammar that allows one token at a time, and its matcher."""

    notes = ()
    is_terminated = is_accepting = False

    def __init__(self) -> None:
        self.count = 0

    def matcher(self) -> Self:
        return type(self)()

    def mask(self) -> None:
        """The next mask can always be made."""

    def accept(self, tokens: list[int]) -> int:
        right = tokens == [self.count * 7 % 94]
        self.count += right
        return int(right)

    def forced_tokens(self) -> list[int]:
        return [(self.count + place) * 7 % 94 for place in range(3)]

    def allows(self, tokens: list[int]) -> int:
        expected = [(self.count + place) * 7 % 94 for place in range(len(tokens))]
        return next((place for place, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), len(tokens))

    def fill_mask(self, row: np.ndarray) -> None:
        self._fill(row, self.count)

    def fill_draft_masks(self, drafts: list[int], rows: np.ndarray) -> int:
        for place, row in enumerate(rows):
            self._fill(row, self.count + place)
        return len(drafts)

    def _fill(self, row: np.ndarray, count: int) -> None:
        token = count * 7 % 94
        row[:] = 0
        row.view(np.uint32)[token // 32] = np.uint32(1 << (token % 32))


def count_steps(engine: NativeEngine) -> Counter[str]:
    """How the steps of an engine are planned, from now on."""
    seen: Counter[str] = Counter()
    runner = engine._parts.runner
    launch = runner.launch

    def counted(plan: Any, masks: Any = None) -> Any:
        kind = "ahead" if plan.ahead is not None else "host" if plan.drafts.any() else "plain"
        seen[kind] += 1
        seen["follows"] += int(plan.slack.any())
        seen["drafts"] += plan.ahead.budget if plan.ahead is not None else 0
        return launch(plan, masks)

    runner.launch = counted  # type: ignore[method-assign]
    return seen


def random_job(rng: random.Random, grammars: float = 0.0) -> list[Request]:
    prefixes = [[rng.randrange(94) for _ in range(30)] for _ in range(2)]
    requests = [random_request(rng, f"r{place}", prefixes) for place in range(rng.randrange(2, 9))]
    bound = [
        replace(ask(f"g{place}", "abc"[place:], max_tokens=rng.randrange(3, 12)), grammar=Cycle())
        for place in range(3)
        if rng.random() < grammars
    ]
    mixed = requests + bound
    rng.shuffle(mixed)
    return mixed


def check_all(engine: NativeEngine, requests: list[Request], on_step: Callable[[int], Any] | None = None) -> None:
    outputs = run(engine, requests, on_step)
    for request in requests:
        if request.grammar is None:
            check(request, outputs[request.request_id])
        else:
            said = outputs[request.request_id].outputs[0].token_ids
            assert said == [place * 7 % 94 for place in range(request.params.max_tokens or 0)]
    assert engine._parts.cache.stats().used_pages == 0


def sizes(rng: random.Random) -> dict[str, Any]:
    return {
        "pages": rng.choice([34, 60, 200]),
        "running": rng.choice([2, 8]),
        "budget": rng.choice([12, 24, 64]),
        "prefix": rng.random() < 0.7,
    }
