"""vLLM's grammar backend over this package's router. A shell: translate, compile, match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from deepinfer_structured import Matcher, StructuredError, Vocabulary, compile_spec, mask_words
from deepinfer_structured.adapters.vllm import compat, translate


def validate(original: Callable[..., None], params: Any, model_config: Any, config: Any, tokenizer: Any) -> None:
    """Check a request in the front end, so that a schema that cannot be enforced is a 400 and never reaches the core."""
    wanted = params.structured_outputs
    if config is None or wanted is None:
        return
    if tokenizer is None or model_config.is_diffusion:
        original(params, model_config, config, tokenizer)  # vLLM's own refusals
        return
    try:
        spec = translate.spec_of_params(wanted)
        if spec is not None:
            compile_spec(spec, Vocabulary.bytewise())
    except StructuredError as error:
        raise VLLMValidationError(str(error)) from error
    wanted._backend = compat.CARRIER
    wanted._backend_was_auto = True


class DeepInferGrammar(StructuredOutputGrammar):
    """One request's matcher."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return self._matcher.accept(tokens) == len(tokens)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[: self._matcher.allows(tokens)]

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        self._matcher.fill_mask(bitmask[batch_index].numpy())

    def is_terminated(self) -> bool:
        # vLLM stops masking here, so it must not be before the end-of-sequence token has been accepted: where nothing
        # but that token can follow, this matcher calls itself terminated already.
        return self._matcher.is_terminated and not self._matcher.is_accepting

    def reset(self) -> None:
        self._matcher.rollback(len(self._matcher))


class DeepInferBackend(StructuredOutputBackend):
    """Compiles requests for the model's vocabulary; requests with other stop ids get a vocabulary of their own."""

    def __init__(self, vllm_config: Any, tokenizer: Any, vocab_size: int) -> None:
        super().__init__(vllm_config, tokenizer, vocab_size)
        self._vocabularies: dict[frozenset[int], Vocabulary] = {}
        self._width = max(vocab_size, len(tokenizer))

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        stops = frozenset(stop_token_ids or ())
        if stops not in self._vocabularies:
            self._vocabularies[stops] = translate.vocabulary(self.tokenizer, self._width, stops)
        spec = translate.spec_of_key(request_type.name, grammar_spec)
        return DeepInferGrammar(compile_spec(spec, self._vocabularies[stops]).matcher())

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.full((max_num_seqs, mask_words(self._width)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        self._vocabularies.clear()
