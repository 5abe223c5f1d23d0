"""Proposers for vLLM's `custom_class` method. Shells over this package's drafters: translate, follow, propose."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.adapters.vllm import compat
from deepinfer_specdec.adapters.vllm.translate import RowTracker
from deepinfer_specdec.drafters.base import Drafter
from deepinfer_specdec.drafters.ngram import NgramDrafter
from deepinfer_specdec.drafters.suffix import SuffixDrafter

compat.require_supported()


class DrafterProposer:
    """Feeds vLLM's token rows to a drafter and returns its drafts.

    Args:
        vllm_config: `num_speculative_tokens` of its speculative config bounds a draft.
        drafter: follows the sequences.
    """

    def __init__(self, vllm_config: Any, drafter: Drafter) -> None:
        self._drafter = drafter
        self._limit = vllm_config.speculative_config.num_speculative_tokens
        self._max_len = vllm_config.model_config.max_model_len
        self._tracker = RowTracker()

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.integer],
        token_ids_cpu: NDArray[np.integer],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft for each row, empty where the row sampled nothing (an unfinished prefill) or has no room left.

        Args:
            sampled_token_ids: what each row sampled in this step.
            num_tokens_no_spec: [rows], tokens of each row, those just sampled included.
            token_ids_cpu: [rows, max_len], the tokens themselves.
        """
        rows = [i for i, sampled in enumerate(sampled_token_ids) if sampled]
        found, gone = self._tracker.update(rows, num_tokens_no_spec, token_ids_cpu)
        for name in gone:
            self._drafter.end(name)
        for row, (name, before) in zip(rows, found, strict=True):
            tokens = np.asarray(token_ids_cpu[row, before : int(num_tokens_no_spec[row])], np.int32)
            if before:
                self._drafter.extend(name, tokens)
            else:
                self._drafter.begin(name, tokens)
        room = np.asarray([max(0, self._max_len - int(num_tokens_no_spec[r]) - 1) for r in rows], np.int32)
        draft = self._drafter.propose([name for name, _ in found], np.minimum(room, self._limit).astype(np.int32))
        out: list[list[int]] = [[] for _ in sampled_token_ids]
        for i, row in enumerate(rows):
            out[row] = draft.token_ids[i, : int(draft.counts[i])].tolist()
        return out

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load: these drafters have no weights."""


class SuffixProposer(DrafterProposer):
    """Drafts from one suffix automaton over all prompts and answers of the job."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config, SuffixDrafter(vllm_config.speculative_config.num_speculative_tokens))


class NgramProposer(DrafterProposer):
    """Drafts by looking a sequence's last tokens up in the sequence itself."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config, NgramDrafter(vllm_config.speculative_config.num_speculative_tokens))
