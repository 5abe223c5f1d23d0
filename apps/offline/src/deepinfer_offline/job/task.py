"""A good input line, read: what to ask the engine and how to write the answer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer_offline.job.codec import dumps
from deepinfer_offline.job.fields import Kind
from deepinfer_offline.sampling.params import FORMS, SamplingParams


@dataclass(frozen=True, slots=True)
class Task:
    """What one line asks for. Exactly one of `messages`, `text` and `token_ids` is set.

    Attributes:
        custom_id: the user's name of the line.
        kind: the endpoint.
        params: how to sample. `max_tokens` None means up to the context.
        model: the model that the line names, or None.
        messages: a conversation.
        text: a prompt.
        token_ids: a prompt as token ids.
        template: options and variables of the chat template.
        tools: tool definitions, shown to the model through the chat template.
        tool_choice: `none`, `auto`, `required`, or `function:` and the name of the one tool to call.
        one_call: whether at most one tool may be called (`parallel_tool_calls` is false).
        add_special_tokens: whether encoding a text adds what the tokenizer adds; None: its habit for the endpoint.
        echo: whether a completion starts with its prompt.
    """

    custom_id: str
    kind: Kind
    params: SamplingParams
    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str = "none"
    add_special_tokens: bool | None = None
    one_call: bool = False
    echo: bool = False


def greedy_key(task: Task) -> bytes | None:
    """What two lines share exactly when their answers must be equal.

    Only greedy requests have a key: of sampled ones each copy is wanted. Fields that do not matter at temperature 0
    (seed, top_p, top_k, min_p) are left out.

    Returns:
        16 bytes, or None for a request that is sampled.
    """
    params = task.params
    if not params.greedy:
        return None
    plain = replace(params, seed=None, top_p=1.0, top_k=0, min_p=0.0, temperature=0.0, structured_outputs=None)
    values = [getattr(plain, name) for name in SamplingParams.__slots__]
    bias = sorted(params.logit_bias.items()) if params.logit_bias else None
    asked = params.structured_outputs
    form = [getattr(asked, name) for name in FORMS] if asked is not None else None
    values[SamplingParams.__slots__.index("logit_bias")] = bias
    what = [task.kind, task.model, task.messages, task.text, task.token_ids, task.template, task.tools]
    text = dumps([*what, task.tool_choice, task.one_call, task.add_special_tokens, task.echo, form, values])
    return hashlib.blake2b(text, digest_size=16).digest()


def seeded(task: Task, seed: int) -> Task:
    """The task with a seed of its own, so that a rerun of a sampled line draws the same tokens.

    Args:
        task: the task; one with a seed, or a greedy one, is returned as it is.
        seed: the job's seed. Two lines never share a stream, because `custom_id` is unique.
    """
    if task.params.greedy or task.params.seed is not None:
        return task
    digest = hashlib.blake2b(task.custom_id.encode(), digest_size=8, salt=seed.to_bytes(16, "little", signed=True))
    return replace(task, params=replace(task.params, seed=int.from_bytes(digest.digest()[:8], "little") >> 1))
