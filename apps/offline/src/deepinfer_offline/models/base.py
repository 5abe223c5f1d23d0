"""What every model of the native engine is: a forward over one flattened batch, and the cache groups it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch

    from deepinfer_offline.weights.source import ModelSource

CacheKind = Literal["prefix", "window", "state"]
CACHE_KINDS: tuple[CacheKind, ...] = ("prefix", "window", "state")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One kind of cached state, paged in blocks from a pool of its own.

    Attributes:
        name: unique within the model.
        kind: `prefix` = shareable, indexed by content; `window` = only the last `window` positions are read;
            `state` = one block of fixed size a sequence, whatever its length.
        block_size: positions a block covers. `state` groups use 1; their block table has one column.
        bytes_per_block: bytes of one block over all layers of the group.
        window: positions that a query reads, itself included. `window` groups only.
        layers: layers that read the group's windows one after another. `window` groups only.
        hit_multiple: as in `deepinfer_cache.CacheGroup`: tokens at whose multiples a `state` group is empty.
    """

    name: str
    kind: CacheKind
    block_size: int
    bytes_per_block: int
    window: int = 0
    layers: int = 1
    hit_multiple: int = 1

    def __post_init__(self) -> None:
        if self.kind not in CACHE_KINDS:
            raise ValueError(f"cache group {self.name!r}: kind {self.kind!r} is not one of {', '.join(CACHE_KINDS)}")
        if self.block_size < 1 or self.bytes_per_block < 1:
            raise ValueError(
                f"cache group {self.name!r}: block_size {self.block_size} and bytes_per_block {self.bytes_per_block} "
                "must be at least 1"
            )
        if (self.kind == "window") != (self.window > 0):
            raise ValueError(f"cache group {self.name!r}: window is {self.window} but its kind is {self.kind!r}")


@dataclass(frozen=True, slots=True)
class BatchCascade:
    """Rows of one batch whose first `tokens` positions are the same blocks of the prefix groups.

    Attributes:
        rows: int32 [k], batch rows, ascending; k >= 2. Each computes one token, at or past position `tokens`.
        tokens: length of the shared prefix, a multiple of the block size.
    """

    rows: np.ndarray
    tokens: int


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The same facts as `ForwardBatch` on the host (numpy), for shape decisions without a device sync.

    Attributes:
        query_starts: int32 [R + 1], flattened offset of each row's first token; the last entry is T.
        seq_lens: int32 [R], positions known after this step: start + count.
        slots: int32 [R], the fixed row of the sequence.
        prefills: bool [R], True while the row still computes its prompt (or recomputes after a preemption).
        floors: int32 [R], window floor = replay start; positions below it are not read from window groups. 0 if none.
        write_floors: int32 [R], prefix-group entries whose last position is below it are not written (they are shared).
        keep_all: bool [R], logits of every position of the row are wanted, so no position may be trimmed.
        logit_rows: int64 [n], flattened token rows whose hidden state the engine reads.
        block_tables: per group, int32 [R, columns], column j = the block of positions [j * size, (j + 1) * size).
            Columns past the sequence's end, and retired window blocks, hold any value and are never read.
        num_decodes: rows [0, num_decodes) compute exactly one token each; the others follow.
    """

    query_starts: np.ndarray
    seq_lens: np.ndarray
    slots: np.ndarray
    prefills: np.ndarray
    floors: np.ndarray
    write_floors: np.ndarray
    keep_all: np.ndarray
    logit_rows: np.ndarray
    block_tables: Mapping[str, np.ndarray]
    num_decodes: int

    @property
    def counts(self) -> np.ndarray:
        """int32 [R], tokens computed by each row this step."""
        return self.query_starts[1:] - self.query_starts[:-1]

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens, flattened row after row. R rows (sequences), T tokens, all tensors on the model's device.

    Rows that compute one token come first (`host.num_decodes` of them). A model reads true token ids before a chunk
    from `tokens[slot, position]`; positions at or past the sequence's known length hold any value.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], absolute, from 0.
        query_starts: int32 [R + 1].
        seq_lens: int32 [R].
        slots: int32 [R].
        floors: int32 [R].
        write_floors: int32 [R].
        logit_rows: int64 [n].
        block_tables: per group, int32 [R, columns].
        cascades: disjoint groups of decode rows with a common prefix; empty when none pays.
        tokens: int32 [max_running, capacity], the token buffer: prompt and generated ids by slot and position.
        host: the same on the host. Attribute meanings are documented there.
        scratch: what the layers of one forward share (rotary tables, attention metadata). Starts empty.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    floors: torch.Tensor
    write_floors: torch.Tensor
    logit_rows: torch.Tensor
    block_tables: Mapping[str, torch.Tensor]
    cascades: tuple[BatchCascade, ...]
    tokens: torch.Tensor
    host: HostBatch
    scratch: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to build a model. Resolved: no `auto` is left here.

    Attributes:
        device: torch device string, e.g. `cpu`, `cuda:0`.
        dtype: dtype of activations and of the dense weights.
        max_model_len: prompt and output positions of one sequence.
        max_running: sequences that run at once (slots).
        max_step_tokens: tokens of one step, for buffers sized once.
        block_size: positions of one block of the prefix groups.
        draft: folder of a draft model to load beside the model; None for none but its own.
    """

    device: str
    dtype: torch.dtype
    max_model_len: int
    max_running: int
    max_step_tokens: int
    block_size: int
    draft: Path | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_running", "max_step_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What can be said from the configuration alone, before any weight is read.

    Attributes:
        model_type: as in the checkpoint's config.
        vocab_size: width of the logits.
        max_positions: longest sequence the checkpoint was made for.
        weight_bytes: memory of the loaded weights, in bytes.
        workspace_bytes: peak memory of one step beside weights and cache, in bytes (estimate, rounded up).
        cache_groups: what it caches. The first group is the one that capacity in tokens is quoted for.
        checkpoint_dtype: torch dtype name of the stored weights, e.g. `bfloat16`; used by dtype `auto`.
        image_token_id: the id that stands for a piece of an image; prompts must not have it, since images are not read.
        graph_bytes: memory that captured steps work in, in bytes: what the largest of them needs beside weights, cache and inputs
            (estimate, rounded up). 0 where none is captured.
        graph_branch_bytes: the part of it that is used on a second stream.
    """

    model_type: str
    vocab_size: int
    max_positions: int
    weight_bytes: int
    workspace_bytes: int
    cache_groups: tuple[CacheGroup, ...]
    checkpoint_dtype: str = "bfloat16"
    image_token_id: int | None = None
    graph_bytes: int = 0
    graph_branch_bytes: int = 0


@runtime_checkable
class FollowsStrategy(Protocol):
    """A model that computes prompts differently under each window strategy of the cache."""

    def follow_strategy(self, strategy: str, *, decoder_replay: bool) -> None:
        """Fit to `deepinfer_cache.CacheConfig.strategy`; called once, before the first step.

        Args:
            strategy: of the cache.
            decoder_replay: whether prompt rows may be left out of layers that cache nothing for later requests.
        """
        ...


DraftChooser = Callable[["torch.Tensor", int], "torch.Tensor"]
"""Takes a token for each row of a draft's column: logits float32 [R, vocab] and the column -> int64 [R]."""


@dataclass(frozen=True, slots=True)
class DraftedBlocks:
    """Tokens guessed for R sequences, K each; column j is for the position j + 1 after the anchor.

    Attributes:
        token_ids: int64 [R, K].
        confidence: float32 [R, K], raw: its sigmoid is the chance that column j holds if those before it do. Computed without
            looking at token j.
    """

    token_ids: torch.Tensor
    confidence: torch.Tensor


@runtime_checkable
class DraftsBlocks(Protocol):
    """A model with a block draft (DSpark), its own or one that was loaded with it.

    The draft's context is what `forward` leaves of a position in the blocks of the cache group `draft_group`. So it is shared,
    evicted and computed again as the target's own entries are, and what rejected drafts left is overwritten like theirs.
    """

    draft_group: str

    @property
    def draft_width(self) -> int:
        """Tokens of a block; 0 for a model without a draft."""
        ...

    def start_drafting(self) -> None:
        """From now on `forward` also writes the draft's context. Called once, before the first step."""
        ...

    def draft_blocks(
        self,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        cache: Any,
        choose: DraftChooser,
        longest: int,
    ) -> DraftedBlocks:
        """Draft one block a sequence. Reads the context before each anchor; changes nothing, and does not wait for the device.

        Args:
            anchors: int64 [R], the last known tokens.
            positions: int64 [R], their positions.
            tables: int64 [R, columns], block tables of `draft_group`, up to the anchor's block.
            cache: from `allocate_cache`.
            choose: see there; called once a column, in order.
            longest: upper bound of `positions`, known on the host.
        """
        ...


@runtime_checkable
class CapturesBlocks(Protocol):
    """A model with a block draft (`DraftsBlocks`) whose two stages can be captured as CUDA graphs: `draft_blocks` is one after
    the other.
    """

    draft_group: str

    def draft_states(
        self, anchors: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, cache: Any, longest: int
    ) -> torch.Tensor:
        """The parallel stage: hidden states [R, K, hidden]. Arguments as of `DraftsBlocks.draft_blocks`, but `tables` may have
        more columns.
        """
        ...

    def finish_blocks(self, hidden: torch.Tensor, anchors: torch.Tensor, choose: DraftChooser) -> DraftedBlocks:
        """The sequential stage of the same rows. Nothing but `choose` writes anything."""
        ...


@runtime_checkable
class TakesBounds(Protocol):
    """A model whose `forward` takes the lengths of rows from the device alone.

    Of `HostBatch` it uses shapes, flags and upper bounds: how tokens are spread over decode rows may be another there than in
    `query_starts` and `seq_lens` on the device (no row is longer than the longest on the host), and `seq_lens` may be too high.
    Rows that compute prompts are exact.
    """

    @property
    def takes_bounds(self) -> bool:
        """Whether it is so with the ops that were chosen."""
        ...


@runtime_checkable
class Capturable(Protocol):
    """A model whose decode steps can be captured as CUDA graphs.

    In such a step every row computes one token. `forward` and `logits` are called with a batch whose tensors stay where they
    are and whose `host` carries shapes and upper bounds only: `seq_lens` are the limit, and there are no tables.
    """

    def capture_limit(self, rows: int, longest: int) -> int | None:
        """Positions that one captured step of so many rows serves, for a step whose longest sequence has `longest`.

        Few values of the result, since each is captured by itself; None where the step cannot be captured.
        """
        ...


@runtime_checkable
class CapturesPrompts(Protocol):
    """A model whose steps with prompts can be captured as CUDA graphs too.

    `forward` is then called with a batch whose tensors stay where they are and whose `host` carries shapes and upper bounds only,
    as for `Capturable`. Beyond what `TakesBounds` allows, some rows may be empty on the device, those of one token among them,
    and tokens behind the last row belong to none: whatever is computed of them is not read, and nothing of them is written to
    the cache.
    """

    @property
    def captures_prompts(self) -> bool:
        """Whether it is so with the ops that were chosen."""
        ...


@runtime_checkable
class Model(Protocol):
    """A loaded model. `forward` writes the cache in place; everything else is a query."""

    facts: ModelFacts
    options: ModelOptions

    @classmethod
    def describe(cls, config: Mapping[str, Any], options: ModelOptions) -> ModelFacts:
        """Facts for a checkpoint config under these options. Raises EngineStartError for what it cannot run."""
        ...

    @classmethod
    def load(cls, source: ModelSource, options: ModelOptions) -> Model:
        """Read the weights. Raises EngineStartError naming missing, unexpected and misshapen tensors."""
        ...

    def allocate_cache(self, num_blocks: Mapping[str, int]) -> Any:
        """Allocate the pools, `num_blocks[group.name]` blocks each. The result is opaque to the engine."""
        ...

    def forward(self, batch: ForwardBatch, cache: Any) -> torch.Tensor:
        """Compute every token of the batch and write its cache entries.

        Returns:
            The final, normalised hidden states of `batch.logit_rows`, [n, hidden], in that order, model dtype.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [n, hidden] to logits, float32 [n, vocab_size]."""
        ...
