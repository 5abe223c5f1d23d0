"""The Python interface: a model, prompts in, answers out."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from deepinfer_offline.engine.base import Engine, EngineInfo, EngineStats, Request, RequestError, RequestOutput
from deepinfer_offline.engine.factory import build_engine
from deepinfer_offline.engine.options import DEFAULT_MODEL, EngineOptions, parse_bytes
from deepinfer_offline.sampling.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from rich.progress import Progress

Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A model that answers lists of prompts. Names follow vLLM's `LLM` where the meaning is the same.

    Args:
        model: a Hugging Face folder, a GGUF file, or the name of an embedded model.
        engine: `auto`, `native` or `vllm`.
        device: `auto`, `cpu`, `cuda` or `npu`.
        dtype: `auto`, `bfloat16` or `float32`.
        max_model_len: longest prompt and answer together, tokens; None: the model's own.
        block_size: tokens of a KV block; None: the engine's choice.
        kv_memory: memory of the KV cache, bytes or text such as `"4GiB"`; None: chosen from what is free.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens that one forward computes.
        enable_prefix_caching: share the KV of equal prompt prefixes.
        async_scheduling: plan one step ahead of the device.
        window_strategy: `auto`, `bounded`, `full`, `periodic`, `periodic(N)` or `exact`: what a hit in the prefix cache
            means for sliding windows (see `EngineOptions`).
        decoder_replay: whether a V4.1 prompt may pass the decoder layers with its last window only.
        speculative: `off`, `auto`, `dspark`, `ngram` or `suffix`.
        draft_model: folder of a DSpark draft for the model, for `auto` and `dspark`.
        kv_store: a folder that keeps the KV blocks of prompts for later runs; None keeps nothing.
        seed: where the random numbers of requests without a seed of their own start.
        options: further fields of `deepinfer_offline.engine.options.EngineOptions`.

    Raises:
        EngineStartError: no such model, too little memory, ...; one sentence.
        OptionsError: a value is outside what its option allows.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        engine: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        block_size: int | None = None,
        kv_memory: int | str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        async_scheduling: bool = True,
        window_strategy: str = "auto",
        decoder_replay: bool = True,
        speculative: str = "off",
        draft_model: str | Path | None = None,
        kv_store: str | Path | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._engine: Engine | None = build_engine(
            EngineOptions(
                model=str(model),
                engine=engine,
                device=device,
                dtype=dtype,
                max_model_len=max_model_len,
                block_size=block_size,
                kv_memory=parse_bytes(kv_memory) if isinstance(kv_memory, str) else kv_memory,
                max_running=max_num_seqs,
                max_tokens_per_step=max_num_batched_tokens,
                enable_prefix_caching=enable_prefix_caching,
                async_scheduling=async_scheduling,
                window_strategy=window_strategy,
                decoder_replay=decoder_replay,
                speculative=speculative,
                draft_model=None if draft_model is None else Path(draft_model),
                kv_store=None if kv_store is None else Path(kv_store),
                seed=seed,
                **options,
            )
        )
        self._count = 0

    # --- answers ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one prompt or a list of them: text, a list of token ids, `{"prompt": ...}` or
                `{"prompt_token_ids": ...}`.
            sampling_params: one for all, or one a prompt; None: the defaults of `SamplingParams`.
            use_tqdm: show a progress bar.

        Returns:
            One output a prompt, in their order. A prompt that cannot be answered gives an output whose `error` says
            why; the others are answered.

        Raises:
            ValueError: the number of parameters is not the number of prompts.
            TypeError: something else than `SamplingParams` among the parameters.
        """
        items = [prompts] if _is_one(prompts) else list(prompts)
        return self._answer(items, self._ids, sampling_params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template.

        Args:
            messages: one conversation or a list of them; a conversation is a list of `{"role", "content"}`.
            sampling_params: one for all, or one a conversation.
            use_tqdm: show a progress bar.
            add_generation_prompt: end the prompt with the start of an answer.
            tools: tool definitions for templates that know them.
            chat_template_kwargs: further names that the template may read.

        Returns:
            As `generate`.
        """
        items = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools, **(chat_template_kwargs or {})}

        def ids(conversation: Any) -> list[int]:
            return self._tokenizer("messages").encode_chat(conversation, **options)

        return self._answer(items, ids, sampling_params, use_tqdm=use_tqdm)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """The model's output for every position of one sequence.

        Args:
            token_ids: n ids.

        Returns:
            float32 [n, vocab]; row i is the distribution of the token after `token_ids[: i + 1]`, before the softmax.

        Raises:
            RequestError: ids that the model does not have, or too many of them.
            NotImplementedError: the engine does not give logits (vLLM).
        """
        engine = self.engine
        compute = getattr(engine, "logits", None)
        if compute is None:
            raise NotImplementedError(f"engine {engine.info.engine} does not give logits; use engine='native'")
        return compute(token_ids)

    # --- the engine ------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine. Raises RuntimeError after `close`."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    @property
    def info(self) -> EngineInfo:
        """What runs."""
        return self.engine.info

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return self.engine.stats()

    def get_tokenizer(self) -> Any:
        """The `deepinfer_offline.text.tokenizer.Tokenizer`, or None."""
        return self.engine.tokenizer

    def close(self) -> None:
        """Stop the engine and free its memory. May be called again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ----------------------------------------------------------------------------------------------

    def _answer(self, items: list[Any], encode: Any, params: Any, *, use_tqdm: bool) -> list[RequestOutput]:
        engine = self.engine
        asked = _params_of(params, len(items))
        outputs: dict[str, RequestOutput] = {}
        names = [str(self._count + place) for place in range(len(items))]
        self._count += len(items)
        try:
            for name, item, one in zip(names, items, asked, strict=True):
                refused = _add(engine, name, item, one, encode)
                if refused is not None:
                    outputs[name] = refused
            with _progress(len(items), use_tqdm) as advance:
                advance(len(outputs))
                while len(outputs) < len(items) and engine.has_unfinished():
                    found = engine.step()
                    outputs.update((output.request_id, output) for output in found)
                    advance(len(found))
        except BaseException:
            for name in names:
                engine.abort(name)
            raise
        return [outputs[name] for name in names]

    def _ids(self, prompt: Any) -> Sequence[int]:
        """Token ids of a prompt in any of its forms. Raises RequestError for anything else."""
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            return self._tokenizer("a text prompt").encode(prompt)
        if isinstance(prompt, Sequence) or hasattr(prompt, "tolist"):
            ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
            if all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
                return ids
        raise RequestError(
            f"a prompt must be text, a list of token ids, or an object with prompt or prompt_token_ids; got {prompt!r:.80}",
            param="prompt",
        )

    def _tokenizer(self, what: str) -> Any:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            name = self.engine.info.model
            raise RequestError(f"{name} has no tokenizer, so it cannot read {what}; give token ids", param="prompt")
        return tokenizer


def _add(engine: Engine, name: str, item: Any, params: SamplingParams, encode: Any) -> RequestOutput | None:
    """Queue one item, or say why it cannot be answered."""
    ids: Sequence[int] = ()
    try:
        ids = encode(item)
        engine.add_request(Request(name, ids, params, prompt=item if isinstance(item, str) else None))
    except RequestError as error:
        return RequestOutput(name, ids, [], error=error)
    return None


def _is_one(prompts: Any) -> bool:
    """Whether this is a single prompt: text, an object, or a non-empty list of ids."""
    if isinstance(prompts, str | Mapping):
        return True
    return len(prompts) > 0 and all(isinstance(token, int) for token in prompts)


def _params_of(params: Any, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    asked: list[Any] = [params] if isinstance(params, Mapping) else list(params)
    for one in asked:
        if not isinstance(one, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams(...), got {type(one).__name__} {one!r:.60}")
    if len(asked) != count:
        raise ValueError(f"{len(asked)} sampling_params for {count} prompts; give one for all, or one a prompt")
    return asked


@contextmanager
def _progress(total: int, show: bool) -> Generator[Any, None, None]:
    """A function that moves the bar on."""
    if not show:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    bar: Progress
    with Bar(*columns) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda count: bar.advance(task, count)
