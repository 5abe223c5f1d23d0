"""From a Task to a Request: tokens, lengths, seed. Everything here needs to know the model."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from deepinfer_offline.engine.base import EngineInfo, Request, RequestError
from deepinfer_offline.job.errors import LineError, show
from deepinfer_offline.job.task import Task, seeded
from deepinfer_offline.job.toolcalls import tool_form
from deepinfer_offline.sampling.params import SamplingParams


class Preparer:
    """Turns tasks into requests. Runs on the planning thread.

    Args:
        info: the engine that will run them.
        tokenizer: its tokenizer, or None.
        served: model names that a line may ask for.
        seed: the job's seed.
    """

    def __init__(self, info: EngineInfo, tokenizer: Any, served: Iterable[str], seed: int) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._served = tuple(dict.fromkeys(served))
        self._seed = seed

    def prepare(self, task: Task, request_id: str) -> tuple[Request, str | None]:
        """Make the request of a task.

        Args:
            task: what a line asks for.
            request_id: the name that the engine knows it by.

        Returns:
            The request, and the prompt's text if the answer starts with it.

        Raises:
            LineError: another model's name, a prompt or answer that does not fit the context, a token id that the model
                does not have.
        """
        self._check_model(task.model)
        try:
            ids = self._encode(task)
            params = self._fit(seeded(task, self._seed).params, len(ids), "messages" if task.messages else "prompt")
        except RequestError as error:
            raise LineError(str(error), code=error.code, param=error.param) from error
        self._check_ids(ids, params)
        form = tool_form(task)
        if form is not None:
            params = replace(params, structured_outputs=form)
        text = None
        if task.echo:
            text = task.text if task.text is not None else self._decode(ids)
        return Request(request_id, array("i", ids), params), text

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in self._served:
            raise LineError(
                f"model {show(model)} is not served by this run, which serves {' or '.join(map(show, self._served))}",
                code="model_not_found",
                param="model",
                status=404,
            )

    def _encode(self, task: Task) -> list[int]:
        if task.token_ids is not None:
            return task.token_ids
        if self._tokenizer is None:
            where = "messages" if task.messages is not None else "prompt"
            raise LineError(
                f"{self._info.model} has no tokenizer; send the prompt as token ids to /v1/completions", param=where
            )
        if task.messages is not None:
            return self._encode_chat(task, task.messages)
        add = task.add_special_tokens
        ids = self._encode_text(task.text or "", "prompt", add_special_tokens=True if add is None else add)
        if not ids:
            raise LineError("prompt has no tokens", code="empty_prompt", param="prompt")
        return ids

    def _encode_chat(self, task: Task, messages: list[dict[str, Any]]) -> list[int]:
        options = {**task.template, "tools": task.tools}
        template = self._tokenizer.chat_template
        if template is None:  # encode_chat has the words for it
            return self._tokenizer.encode_chat(messages)
        if options.pop("continue_final_message", False):
            text = _up_to_last(messages, template.render(messages, **{**options, "add_generation_prompt": False}))
        else:
            text = template.render(messages, **options)
        return self._encode_text(text, "messages", add_special_tokens=False)

    def _encode_text(self, text: str, where: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text. One that cannot fit is refused before it is encoded: its ids could take all memory there is."""
        fewest = self._tokenizer.fewest_tokens(text) if len(text) >= self._info.max_model_len else 0
        if fewest >= self._info.max_model_len:
            raise self._prompt_too_long(f"at least {fewest} tokens ({len(text)} characters)", where)
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except RequestError as error:
            raise LineError(str(error), code=error.code, param=where) from error

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            raise LineError("echo needs a tokenizer, and this model has none", param="echo")
        return self._tokenizer.decode(ids)

    def _fit(self, params: SamplingParams, prompt: int, where: str) -> SamplingParams:
        context = self._info.max_model_len
        if prompt >= context:
            raise self._prompt_too_long(f"{prompt} tokens", where)
        room = context - prompt
        if params.max_tokens is None:
            if params.min_tokens > room:
                raise self._too_long("min_tokens", params.min_tokens, prompt)
            return replace(params, max_tokens=room)
        if params.max_tokens > room:
            raise self._too_long("max_tokens", params.max_tokens, prompt)
        return params

    def _prompt_too_long(self, size: str, where: str) -> LineError:
        return LineError(
            f"the prompt has {size}, and the context of {self._info.model} is {self._info.max_model_len} tokens, "
            "prompt and answer together",
            code="context_length_exceeded",
            param=where,
        )

    def _too_long(self, name: str, value: int, prompt: int) -> LineError:
        context = self._info.max_model_len
        return LineError(
            f"{name} is {value} and the prompt has {prompt} tokens, {value + prompt} together; the context of "
            f"{self._info.model} is {context} tokens, which leaves room for {context - prompt}",
            code="context_length_exceeded",
            param=name,
        )

    def _check_ids(self, prompt: list[int], params: SamplingParams) -> None:
        size = self._info.vocab_size
        for where, ids in (
            ("prompt", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            worst = max(ids or (0,))
            if worst >= size:
                raise LineError(f"{where} has the token id {worst}, but the vocabulary ends at {size - 1}", param=where)


def _up_to_last(messages: list[dict[str, Any]], text: str) -> str:
    """A rendered conversation up to the end of its last message's content, so that the model goes on with it."""
    content = messages[-1].get("content", "").strip()
    end = text.rfind(content)
    if not content or end < 0:
        raise LineError(
            "continue_final_message needs a last message whose content the chat template repeats as it is",
            param="continue_final_message",
        )
    return text[: end + len(content)]
