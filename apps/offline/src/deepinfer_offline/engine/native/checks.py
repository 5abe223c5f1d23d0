"""Requests that this engine can never run, told before anything is queued."""

from __future__ import annotations

import numpy as np

from deepinfer_offline.engine.base import EngineInfo, Request, RequestError


def check_request(
    request: Request, info: EngineInfo, *, has_tokenizer: bool, image_token_id: int | None = None
) -> None:
    """Raise RequestError, naming the field, when the request cannot run on this model.

    Args:
        request: what is asked.
        info: limits of the engine.
        has_tokenizer: whether text can be made.
        image_token_id: the id that stands for images, which no engine here reads; None if the model has none.
    """
    _check_prompt(request, info, image_token_id)
    params = request.params
    if params.stop and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer; this model has none: use stop_token_ids", param="stop")
    for name, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids or ())):
        if (largest := max(ids, default=0)) >= info.vocab_size:  # any integer so far
            raise _unknown_id(name, largest, info.vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > info.vocab_size:
            raise RequestError(
                f"{name} must be at most the vocabulary's {info.vocab_size} tokens, got {wanted}",
                code="invalid_value",
                param=name,
            )


def _check_prompt(request: Request, info: EngineInfo, image_token_id: int | None) -> None:
    length = len(request.prompt_token_ids)
    if not length:
        raise RequestError("the prompt is empty; it needs at least one token", code="empty_prompt", param="prompt")
    if length >= info.max_model_len:
        raise RequestError(
            f"the prompt has {length} tokens; the context holds {info.max_model_len} tokens, "
            "prompt and at least one token of the answer together",
            code="context_length_exceeded",
            param="prompt",
        )
    try:
        ids = np.asarray(request.prompt_token_ids, np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"the prompt's token ids are not integers: {error}", param="prompt") from error
    if int(ids.view(np.uint64).max()) >= info.vocab_size:  # a negative id is a large number there
        raise _unknown_id("prompt", int(ids[(ids < 0) | (ids >= info.vocab_size)][0]), info.vocab_size)
    if image_token_id is not None and (ids == image_token_id).any():
        place = int(np.argmax(ids == image_token_id))
        raise RequestError(
            f"the prompt has token id {image_token_id} at position {place}, which stands for an image: "
            "this engine reads text only, no images",
            code="images_unsupported",
            param="prompt",
        )


def _unknown_id(name: str, token_id: int, vocab_size: int) -> RequestError:
    return RequestError(
        f"{name} has token id {token_id}; this model's ids are 0 to {vocab_size - 1}", code="invalid_value", param=name
    )
