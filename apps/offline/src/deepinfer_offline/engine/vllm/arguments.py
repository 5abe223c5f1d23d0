"""Engine options as vLLM's engine arguments, any further `--engine-arg KEY=VALUE` included."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import types
import typing
from typing import Any

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.engine.options import EngineOptions

DEFAULT_MAX_RUNNING = 256
DEFAULT_BLOCK_SIZE = 16  # vLLM's own; an attention backend that needs larger blocks takes them
_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}


def engine_arguments(options: EngineOptions, model: str, known: type) -> dict[str, Any]:
    """Return keyword arguments for vLLM's `EngineArgs`.

    Args:
        options: what the user chose.
        model: the folder that vLLM shall load.
        known: the `EngineArgs` dataclass; an `--engine-arg` that it lacks is refused by name.

    Raises:
        EngineStartError: an unknown argument or a value of the wrong type.
    """
    if options.kv_store is not None:
        raise EngineStartError("--kv-store: only the native engine keeps KV blocks this way; use --engine native")
    if options.draft_model is not None:
        raise EngineStartError(
            "--draft-model: use --engine native, or --engine-arg speculative-config=... for vLLM's own"
        )
    if options.speculative != "off":
        raise EngineStartError(
            f"--speculative {options.speculative}: use --engine native, or --engine-arg speculative-config=... for vLLM's own"
        )
    if not options.decoder_replay:
        raise EngineStartError("--no-decoder-replay: only the native engine replays decoders; use --engine native")
    if options.on_unsupported != "error":
        raise EngineStartError(
            f"--on-unsupported {options.on_unsupported}: vLLM's own grammar engines decide this; use --engine native"
        )
    if options.window_strategy != "auto":
        raise EngineStartError(
            f"--window-strategy {options.window_strategy}: vLLM decides this itself; use --engine native, or "
            "--engine-arg for what vLLM offers"
        )
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": options.dtype,
        "seed": options.seed,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_running or DEFAULT_MAX_RUNNING,
        "enable_prefix_caching": options.enable_prefix_caching,
        "tensor_parallel_size": options.tensor_parallel_size,
        "data_parallel_size": options.data_parallel_size,
        "enable_expert_parallel": options.expert_parallel,
        "kv_cache_memory_bytes": options.kv_memory,
        "block_size": options.block_size,
        "max_num_batched_tokens": options.max_tokens_per_step,
        "async_scheduling": options.async_scheduling,
        "trust_remote_code": False,
        "disable_log_stats": True,
    }
    arguments = {name: value for name, value in arguments.items() if value is not None}
    for name, text in options.engine_args:
        field = name.replace("-", "_").strip("_")
        arguments[field] = parse_value(field, text, known)
    if arguments["trust_remote_code"]:
        raise EngineStartError(
            "trust_remote_code runs code that comes with a model, and DeepInfer never does; "
            "use a model that vLLM itself supports"
        )
    return arguments


def parse_value(name: str, text: str, known: type) -> Any:
    """Read one `--engine-arg` by the type of the field it names; objects and lists are written as JSON."""
    fields = {field.name: field for field in dataclasses.fields(known)}
    if name not in fields:
        word = name.split("_")[0]
        near = (
            difflib.get_close_matches(name, fields, n=4) or sorted(f for f in fields if len(word) > 2 and word in f)[:4]
        )
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise EngineStartError(f"--engine-arg {name}: vLLM has no such engine argument{hint}")
    wanted = _type_of(fields[name].type, known, name)
    choices = typing.get_args(wanted) if isinstance(wanted, types.UnionType) or typing.get_origin(wanted) else ()
    kinds = set(choices) or {wanted}
    lowered = text.strip().lower()
    if lowered in ("none", "null") and type(None) in kinds:
        return None
    if bool in kinds and lowered in _TRUE | _FALSE:
        return lowered in _TRUE
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise EngineStartError(f"--engine-arg {name}: {text!r} is not JSON ({error})") from error
    if kinds & {int, float, bool} and str not in kinds:
        names = " or ".join(sorted("none" if k is type(None) else getattr(k, "__name__", str(k)) for k in kinds))
        raise EngineStartError(f"--engine-arg {name}: {text!r} is not of type {names}")
    return text


def _type_of(annotation: Any, known: type, name: str) -> Any:
    """Resolve one field's annotation; str where it names what vLLM imports for type checkers alone."""
    holder = type(name, (), {"__annotations__": {name: annotation}})
    try:
        return typing.get_type_hints(holder, vars(sys.modules[known.__module__]))[name]
    except NameError:
        return str
