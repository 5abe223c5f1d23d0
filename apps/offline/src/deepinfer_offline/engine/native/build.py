"""Composes a native engine from the user's options."""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from deepinfer_cache import CacheConfig, CacheManager
from deepinfer_sched import SchedConfig, Scheduler

from deepinfer_offline.engine.base import EngineInfo, EngineStartError
from deepinfer_offline.engine.native.drafting import make_speculation
from deepinfer_offline.engine.native.engine import NativeEngine
from deepinfer_offline.engine.native.flags import check_flags
from deepinfer_offline.engine.native.graphs import planned_bytes
from deepinfer_offline.engine.native.memory import (
    CachePlan,
    choose_kv_bytes,
    choose_strategy,
    paged_groups,
    plan_cache,
    prefix_page_bytes,
)
from deepinfer_offline.engine.native.pages import NativePages
from deepinfer_offline.engine.native.parts import Parts
from deepinfer_offline.engine.native.runner import MAX_DRAFTS, ModelRunner, token_columns
from deepinfer_offline.engine.native.store import KvStore, check_folder, open_tiers
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.engine.options import EngineOptions, format_bytes
from deepinfer_offline.engine.structured import GrammarCompiler
from deepinfer_offline.models.base import CacheGroup, FollowsStrategy, Model, ModelFacts, ModelOptions
from deepinfer_offline.models.registry import model_class
from deepinfer_offline.sampling import Sampler, SamplingTable

if TYPE_CHECKING:
    from deepinfer_offline.text.tokenizer import Tokenizer
    from deepinfer_offline.weights.source import ModelSource

_LOG = logging.getLogger(__name__)
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Sizes that suit a kind of device: enough rows to use it, steps short enough to keep decoding smooth."""

    max_running: int
    max_step_tokens: int


_DEFAULTS = {"cpu": _Defaults(64, 1024), "cuda": _Defaults(1024, 16384), "npu": _Defaults(256, 8192)}


def build_native(options: EngineOptions, source: ModelSource, tokenizer: Tokenizer | None) -> NativeEngine:
    """Load the model and build everything around it.

    Raises:
        EngineStartError: too little memory, an option this model cannot have, unreadable weights.
    """
    kind, asked, plan = plan_native(options, source)
    model = kind.load(source, asked)
    if isinstance(model, FollowsStrategy):
        model.follow_strategy(plan.config.strategy, decoder_replay=options.decoder_replay)
    return _compose(options, source, tokenizer, model, plan)


def plan_native(options: EngineOptions, source: ModelSource) -> tuple[type[Model], ModelOptions, CachePlan]:
    """What would be built, by the model's configuration and this machine; no weights are read.

    Raises:
        EngineStartError: as `build_native`, for all that can be told so far.
    """
    check_flags(options, source)
    if options.kv_store is not None:
        check_folder(options.kv_store)
    kind = model_class(source.model_type)
    if not options.decoder_replay and not hasattr(kind, "follow_strategy"):
        raise EngineStartError(
            f"--no-decoder-replay: every row passes every layer of {source.name} anyway; only V4.1 has a decoder to replay"
        )
    return kind, *_plan(options, source, kind, choose_device(options.device))


def choose_device(wanted: str) -> str:
    """The torch device for `auto`, `cpu`, `cuda` or `npu`. Raises EngineStartError if it is not there."""
    cuda = torch.cuda.is_available()
    npu = _npu_available() if wanted in ("npu", "auto") and not cuda else False
    found = {"cuda": cuda, "npu": npu, "cpu": True}
    if wanted == "auto":
        wanted = next(name for name, there in found.items() if there)
    elif not found[wanted]:
        raise EngineStartError(f"--device {wanted}: no {wanted} device is visible here; use --device cpu")
    return "cpu" if wanted == "cpu" else f"{wanted}:0"


def choose_dtype(wanted: str, device: str, checkpoint: str) -> torch.dtype:
    """`auto` keeps float32 checkpoints, and takes bfloat16 where the device multiplies it fast."""
    if wanted != "auto":
        return getattr(torch, wanted)
    if checkpoint == "float32" and device != "cpu":
        return torch.float32
    return torch.bfloat16 if device != "cpu" or _cpu_has_bfloat16() else torch.float32


def _plan(
    options: EngineOptions, source: ModelSource, kind: type[Model], device: str
) -> tuple[ModelOptions, CachePlan]:
    """Resolve every `auto`, and fit the cache into memory; nothing large is allocated."""
    wanted = _wanted(options, kind, device)
    facts = kind.describe(source.config, wanted)
    dtype = choose_dtype(options.dtype, device, facts.checkpoint_dtype)
    length = _model_len(options.max_model_len, facts.max_positions, source.name)
    resolved = replace(wanted, dtype=dtype, max_model_len=length)
    facts = kind.describe(source.config, resolved)
    kv_bytes = choose_kv_bytes(facts, device, options.kv_memory, _buffer_bytes(kind, facts, resolved))
    strategy = choose_strategy(options.window_strategy, facts.cache_groups, source.name)
    plan = plan_cache(facts.cache_groups, kv_bytes, _limits(options, facts.cache_groups, resolved, strategy))
    if plan.tokens >= length:
        return resolved, plan
    if options.max_model_len is not None:
        raise EngineStartError(
            f"--max-model-len {length} does not fit: {format_bytes(plan.num_bytes)} of KV memory hold {plan.tokens} tokens"
        )
    resolved = replace(resolved, max_model_len=plan.tokens)
    return resolved, plan_cache(facts.cache_groups, kv_bytes, _limits(options, facts.cache_groups, resolved, strategy))


def _buffer_bytes(kind: type[Model], facts: ModelFacts, resolved: ModelOptions) -> int:
    """What the engine keeps on an accelerator beside weights, cache and a step. The share that is left free on a CPU holds it."""
    if resolved.device == "cpu":
        return 0
    columns = token_columns(resolved.max_model_len, MAX_DRAFTS)
    return TokenBuffer.num_bytes(resolved.max_running, columns) + planned_bytes(kind, facts, resolved)


def _wanted(options: EngineOptions, kind: type[Model], device: str) -> ModelOptions:
    """What is known before the model's configuration is read: its type and length are limits so far."""
    running, step_tokens = _step_size(options, _DEFAULTS[device.partition(":")[0]])
    return ModelOptions(
        device=device,
        dtype=torch.float32 if options.dtype == "float32" else torch.bfloat16,
        max_model_len=options.max_model_len or 1 << 20,
        max_running=running,
        max_step_tokens=step_tokens,
        block_size=options.block_size or getattr(kind, "default_block_size", _BLOCK_SIZE),
        draft=options.draft_model,
    )


def page_tokens(options: EngineOptions, source: ModelSource) -> int:
    """Tokens of what prefixes are shared in: a page of the cache. Looks at the configuration alone.

    Raises:
        EngineStartError: this engine does not run the model.
    """
    kind = model_class(source.model_type)
    wanted = _wanted(options, kind, "cpu")
    groups = kind.describe(source.config, wanted).cache_groups
    return _limits(options, groups, wanted, "bounded").page_size


def _step_size(options: EngineOptions, defaults: _Defaults) -> tuple[int, int]:
    """(sequences that run at once, tokens of a step). Every running sequence needs one token of a step."""
    running, tokens = options.max_running, options.max_tokens_per_step
    if running is not None and tokens is not None and tokens < running:
        raise EngineStartError(
            f"--max-tokens-per-step {tokens} is less than --max-running {running}: "
            "every running sequence computes one token a step"
        )
    if tokens is not None:
        return running or min(defaults.max_running, tokens), tokens
    running = running or defaults.max_running
    return running, max(defaults.max_step_tokens, running)


def _limits(
    options: EngineOptions, groups: tuple[CacheGroup, ...], resolved: ModelOptions, strategy: str
) -> CacheConfig:
    # A row planned ahead of its drafts holds what it may verify, however few all rows do, and also what the drafts of a step
    # already applied may have reached.
    drafts_ahead = options.async_scheduling and options.speculative in ("auto", "dspark")
    reach = resolved.max_step_tokens + (resolved.max_running * MAX_DRAFTS if drafts_ahead else 0)
    return CacheConfig(
        groups=paged_groups(groups),
        num_pages=1,
        max_running=resolved.max_running,
        max_model_len=resolved.max_model_len,
        max_tokens_per_step=reach,
        max_in_flight=_ahead(options) + drafts_ahead,
        enable_prefix_cache=options.enable_prefix_caching,
        strategy=strategy,
        num_layers=max((group.layers for group in groups if group.kind == "window"), default=1),
    )


def _compose(
    options: EngineOptions, source: ModelSource, tokenizer: Tokenizer | None, model: Model, plan: CachePlan
) -> NativeEngine:
    asked, facts = model.options, model.facts
    page_bytes = prefix_page_bytes(facts.cache_groups, plan.config)
    pages, tiers = None, None
    if options.kv_store is not None:
        tiers = open_tiers(options.kv_store, source, model, plan.config, page_bytes, options.kv_store_size)
        pages = NativePages(plan.config, page_bytes)
    cache = CacheManager(plan.config, pages, tiers)
    table = SamplingTable(asked.max_running)
    blocks = {group.name: cache.num_blocks(group.name) for group in facts.cache_groups}
    threads = torch.get_num_threads() if options.async_scheduling else 0
    scheduler = Scheduler(
        SchedConfig(
            max_running=asked.max_running,
            max_tokens_per_step=asked.max_step_tokens,
            max_model_len=asked.max_model_len,
            max_in_flight=_ahead(options),
        ),
        cache,
    )
    sampler = Sampler(table)
    runner = ModelRunner(model, blocks, cache.block_table, sampler, threads=threads)
    if pages is not None:
        pages.bind(runner)
    info = _info(source, model, plan, runner.graph_bytes)
    _LOG.info(
        "memory of %s: weights %s, a step %s, captured steps %s, KV cache %s for %d tokens",
        info.device,
        *map(format_bytes, (info.weight_bytes, facts.workspace_bytes, info.graph_bytes, info.kv_bytes)),
        info.kv_tokens,
    )
    parts = Parts(
        runner=runner,
        scheduler=scheduler,
        cache=cache,
        table=table,
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer, facts.vocab_size, on_unsupported=options.on_unsupported),
        info=info,
        seed=options.seed,
        ahead=_ahead(options),
        speculation=make_speculation(options, runner, scheduler, cache, sampler),
        store=None if options.kv_store is None else KvStore(cache, scheduler, options.kv_store, page_bytes),
    )
    return NativeEngine(parts)


def _info(source: ModelSource, model: Model, plan: CachePlan, graph_bytes: int) -> EngineInfo:
    return EngineInfo(
        engine="native",
        model=source.name,
        device=_device_name(model.options.device),
        dtype=str(model.options.dtype).removeprefix("torch."),
        max_model_len=model.options.max_model_len,
        vocab_size=model.facts.vocab_size,
        kv_tokens=plan.tokens,
        kv_bytes=plan.num_bytes,
        weight_bytes=model.facts.weight_bytes,
        block_size=plan.config.page_size,
        notes=getattr(model, "notes", ()),
        graph_bytes=graph_bytes,
    )


def _ahead(options: EngineOptions) -> int:
    return 2 if options.async_scheduling else 1


def _model_len(asked: int | None, largest: int, name: str) -> int:
    if asked is not None and asked > largest:
        raise EngineStartError(f"--max-model-len {asked} is more than the {largest} positions that {name} was made for")
    return asked or largest


def _npu_available() -> bool:
    try:
        torch_npu = import_module("torch_npu")
    except Exception:  # its import needs the vendor's driver libraries and fails in many ways
        return False
    return bool(torch_npu.npu.is_available())


def _cpu_has_bfloat16() -> bool:
    check = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(check and check())


def _device_name(device: str) -> str:
    if device != "cpu":
        return f"{device} ({getattr(torch, device.partition(':')[0]).get_device_name(device)})"
    return f"cpu ({_cpu_model()}, {torch.get_num_threads()} threads)"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
