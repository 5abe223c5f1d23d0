"""Bodies of /v1/completions."""

from __future__ import annotations

from typing import Any

from deepinfer_offline.job.checks import integer, integers, refuse
from deepinfer_offline.job.errors import LineError
from deepinfer_offline.job.fields import MAX_LOGPROBS, sampling_fields
from deepinfer_offline.job.form import answer_form
from deepinfer_offline.job.task import Task
from deepinfer_offline.sampling.params import SamplingParams

_check_logprobs = integer(0, MAX_LOGPROBS)
_check_ids = integers(0, 1 << 31)


def read(custom_id: str, clean: dict[str, Any]) -> Task:
    """Make a Task of a checked body.

    Raises:
        LineError: no prompt, an empty one, several of them, or parameters that do not go together.
        RequestError: what SamplingParams refuses.
    """
    text, token_ids = _prompt(clean)
    fields: dict[str, Any] = sampling_fields(clean)
    echo = clean.get("echo", False)
    if "logprobs" in clean:
        fields["logprobs"] = _check_logprobs("logprobs", clean["logprobs"])
        if echo:
            fields["prompt_logprobs"] = fields["logprobs"]
    return Task(
        custom_id=custom_id,
        kind="completion",
        params=SamplingParams(**fields, structured_outputs=answer_form(clean)),
        model=clean.get("model"),
        text=text,
        token_ids=token_ids,
        add_special_tokens=clean.get("add_special_tokens"),
        echo=echo,
    )


def _prompt(clean: dict[str, Any]) -> tuple[str | None, list[int] | None]:
    if "prompt" not in clean:
        raise LineError("prompt is missing", code="missing_prompt", param="prompt")
    prompt = clean["prompt"]
    if prompt in ("", []):
        raise LineError("prompt is empty", code="empty_prompt", param="prompt")
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, list):
        raise refuse("prompt", prompt, "a string or a list of token ids", code="invalid_type")
    if isinstance(prompt[0], int) and not isinstance(prompt[0], bool):
        return None, _check_ids("prompt", prompt)
    if len(prompt) > 1:
        raise LineError(
            f"prompt has {len(prompt)} entries; give each a line of its own", code="unsupported_value", param="prompt"
        )
    return _prompt({"prompt": prompt[0]})
