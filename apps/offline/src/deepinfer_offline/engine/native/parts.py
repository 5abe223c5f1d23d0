"""What a native engine is composed of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_cache import CacheManager
    from deepinfer_sched import Scheduler

    from deepinfer_offline.engine.base import EngineInfo
    from deepinfer_offline.engine.native.runner import ModelRunner
    from deepinfer_offline.engine.native.speculation import Speculation
    from deepinfer_offline.engine.native.store import KvStore
    from deepinfer_offline.engine.structured import GrammarCompiler
    from deepinfer_offline.sampling.batch import SamplingTable
    from deepinfer_offline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Parts:
    """What `NativeEngine` is composed of; `deepinfer_offline.engine.native.build` makes it.

    Attributes:
        runner: runs steps; its sampler reads `table`.
        scheduler: decides what runs.
        cache: holds the blocks.
        table: sampling parameters by slot.
        tokenizer: None for a model that takes and gives ids only.
        grammars: compiles structured outputs.
        info: facts for the caller.
        seed: where seeds of requests without their own come from.
        ahead: steps launched before the oldest one's results are taken; 1 is the synchronous loop.
        speculation: drafts for decode rows, or None.
        store: keeps finished pages for later runs, or None.
    """

    runner: ModelRunner
    scheduler: Scheduler
    cache: CacheManager
    table: SamplingTable
    tokenizer: Tokenizer | None
    grammars: GrammarCompiler
    info: EngineInfo
    seed: int = 0
    ahead: int = 2
    speculation: Speculation | None = None
    store: KvStore | None = None
