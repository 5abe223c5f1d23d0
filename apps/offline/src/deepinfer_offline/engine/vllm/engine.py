"""The engine that drives vLLM for the job layer: requests in, finished outputs out, through vLLM's own step loop."""

from __future__ import annotations

import os
import time
from typing import Any

from deepinfer_offline.engine.base import (
    EngineInfo,
    EngineStartError,
    EngineStats,
    Request,
    RequestError,
    RequestOutput,
)
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.engine.vllm import arguments, drivers, startup, translate

SUPPORTED = "0.33."


def import_vllm() -> None:
    """Import vLLM. Raises EngineStartError with what to do when it is missing or of another version."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        import vllm
    except ImportError as error:
        raise EngineStartError(
            f"--engine vllm needs vLLM, which does not import here ({error}); "
            "install it with: uv sync --extra vllm (or pip install vllm==0.33.0), or use --engine native"
        ) from error
    if not vllm.__version__.startswith(SUPPORTED):
        raise EngineStartError(
            f"vLLM {vllm.__version__} is installed; this DeepInfer is built and tested on {SUPPORTED}x: "
            "pip install vllm==0.33.0, or use --engine native"
        )


class VllmEngine:
    """`Engine` over stock vLLM.

    vLLM's engine core runs in a process of its own and plans asynchronously there; `step` collects what it finished.
    With `data_parallel_size` there are several of them, and neighbours in the job's order go to the same one.

    Args:
        options: what the user chose. `options.model` must be a Hugging Face folder by now.
        name: the model name that requests are answered under.
        tokenizer: the job layer's tokenizer.
        show_log: let vLLM's own log through to stderr.

    Raises:
        EngineStartError: vLLM is missing, refuses the options or fails to start; the message carries its root cause.
    """

    def __init__(self, options: EngineOptions, *, name: str, tokenizer: Any, show_log: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stats = EngineStats()
        self._running: dict[str, Request] = {}
        failure = None
        with startup.captured_output(show=show_log) as log:
            try:
                self._start(options)
            except EngineStartError:
                raise
            except Exception as error:
                failure = error
        if failure is not None:
            cause = startup.root_cause(log.text) or f"{type(failure).__name__}: {failure}"
            raise EngineStartError(f"vLLM does not start: {startup.tidy(cause)}") from failure
        self._info = self._describe(name)

    def _start(self, options: EngineOptions) -> None:
        import_vllm()
        import vllm
        import vllm.exceptions
        import vllm.platforms
        import vllm.sampling_params
        from vllm.engine.arg_utils import EngineArgs

        self._vllm = vllm
        self._refusals = (ValueError, TypeError, NotImplementedError, vllm.exceptions.VLLMValidationError)
        chosen = arguments.engine_arguments(options, options.model, EngineArgs)
        several = chosen.get("data_parallel_size", 1) > 1
        self._driver: drivers.Driver = drivers.ParallelDriver(chosen) if several else drivers.StepDriver(chosen)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def add_request(self, request: Request) -> None:
        room = self._info.max_model_len - len(request.prompt_token_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(request.prompt_token_ids)} tokens and the model's context is "
                f"{self._info.max_model_len}, which leaves no room for an answer",
                code="context_length_exceeded",
                param="messages",
            )
        keywords = translate.sampling_arguments(request.params, room)
        if request.params.structured_outputs is not None:
            keywords["structured_outputs"] = self._vllm.sampling_params.StructuredOutputsParams(
                **keywords["structured_outputs"]
            )
        try:
            params = self._vllm.SamplingParams(
                **keywords, output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
            )
            prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
            self._driver.add(request.request_id, prompt, params, request.priority)
        except self._refusals as error:
            raise RequestError(f"vLLM refuses this request: {error}") from error
        self._running[request.request_id] = request
        self._stats.prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self._driver.abort(request_id)

    def step(self) -> list[RequestOutput]:
        begin = time.perf_counter()
        finished = [self._finish(output) for output in self._driver.step()]
        self._stats.steps += 1
        self._stats.decode_seconds += time.perf_counter() - begin
        return [output for output in finished if output is not None]

    def has_unfinished(self) -> bool:
        return bool(self._running)

    def stats(self) -> EngineStats:
        self._stats.running = len(self._running)
        return self._stats

    def close(self) -> None:
        """Stop vLLM's processes and free what they hold."""
        self._driver.close()

    def _finish(self, output: Any) -> RequestOutput | None:
        request = self._running.pop(output.request_id, None)
        if request is None:  # aborted meanwhile
            return None
        if isinstance(output, drivers.Refused):
            if not isinstance(output.error, self._refusals):
                raise output.error
            refusal = RequestError(f"vLLM refuses this request: {output.error}")
            return RequestOutput(request.request_id, request.prompt_token_ids, [], error=refusal)
        result = translate.request_output(output, request.request_id, request.prompt_token_ids, request.params)
        self._stats.finished += 1
        self._stats.cached_tokens += result.num_cached_tokens
        self._stats.computed_prompt_tokens += len(request.prompt_token_ids) - result.num_cached_tokens
        self._stats.generated_tokens += sum(len(c.token_ids) for c in result.outputs)
        return result

    def _describe(self, name: str) -> EngineInfo:
        config = self._driver.config
        cache, model = config.cache_config, config.model_config
        block = cache.block_size or 0
        return EngineInfo(
            engine=f"vllm {self._vllm.__version__}",
            model=name,
            device=self._vllm.platforms.current_platform.get_device_name(),
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            kv_tokens=(cache.num_gpu_blocks or 0) * block,
            kv_bytes=cache.kv_cache_memory_bytes or 0,
            weight_bytes=0,
            block_size=block,
        )
