"""Whether a sequence can ever run, and where it ends."""

from __future__ import annotations

from deepinfer_sched.cache import Cache
from deepinfer_sched.config import SchedConfig
from deepinfer_sched.errors import SequenceError
from deepinfer_sched.sequence import Sequence


def last_length(seq: Sequence, config: SchedConfig) -> int:
    """Tokens, prompt included, at which the sequence ends if nothing stops it before."""
    return min(seq.num_prompt + seq.max_tokens, config.max_model_len)


def check_sequence(seq: Sequence, config: SchedConfig, cache: Cache) -> None:
    """Raise SequenceError, with the numbers, for a sequence that the limits or the cache can never hold."""
    if not seq.tokens or seq.max_tokens < 1:
        raise SequenceError(
            f"sequence {seq.seq_id}: {len(seq.tokens)} prompt tokens and max_tokens {seq.max_tokens}; "
            "both must be at least 1"
        )
    if len(seq.tokens) >= config.max_model_len:
        raise SequenceError(
            f"sequence {seq.seq_id}: a prompt of {len(seq.tokens)} tokens leaves no room to answer within "
            f"max_model_len {config.max_model_len}"
        )
    longest = last_length(seq, config)
    if cache.pages_for(longest) > cache.num_pages:
        raise SequenceError(
            f"sequence {seq.seq_id}: up to {longest} tokens do not fit the cache of "
            f"{cache.num_pages * cache.page_size} tokens"
        )
