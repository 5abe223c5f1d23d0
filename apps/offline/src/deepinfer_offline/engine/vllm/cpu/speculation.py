"""The rejection sampler's kernels in torch: what vLLM launches in Triton on a GPU and in C++ in its CPU build.

Signatures are vLLM 0.33's. A batch has B requests with their drafts behind each other: `cu_num_draft_tokens` [B] is the
running total of draft tokens, drafts of request b are [cu[b - 1], cu[b]).
"""

from __future__ import annotations

from typing import Any

import torch

REJECTED = -1  # a draft id that must be rejected


def owners(cu_num_draft_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for every draft its request and its place in the request, and the draft count of every request."""
    ends = cu_num_draft_tokens.long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    request = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return request, torch.arange(len(request)) - (ends - counts)[request], counts


def _emit(
    output: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    accepted: torch.Tensor,
    tokens: torch.Tensor,
    bonus: torch.Tensor,
    wanted: torch.Tensor,
) -> None:
    """Write each wanted request's tokens up to and including its first rejected position, or all of them and the bonus."""
    request, place, counts = owners(cu_num_draft_tokens)
    width = output.shape[1]
    kept = torch.zeros(len(counts), width, dtype=torch.long)
    kept[request, place] = accepted.long()
    run = kept.cumprod(1).sum(1)  # drafts accepted before the first rejection
    write = wanted[request] & (place <= run[request])
    output[request[write], place[write]] = tokens[write].to(output.dtype)
    whole = wanted & (run == counts)
    output[whole, counts[whole]] = bonus.reshape(-1)[whole].to(output.dtype)


def greedy(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
    uniform_probs: Any = None,
    synthetic_conditional_rates: Any = None,
    SYNTHETIC_MODE: bool = False,
) -> None:
    """Accept drafts that are the target's argmax; the argmax itself is emitted at every position up to a mismatch."""
    if SYNTHETIC_MODE:
        raise NotImplementedError(
            "synthetic acceptance is a benchmark mode that DeepInfer's CPU platform does not have"
        )
    wanted = torch.ones(len(cu_num_draft_tokens), dtype=torch.bool) if is_greedy is None else is_greedy
    accepted = draft_token_ids.long() == target_argmax.long()
    _emit(output_token_ids, cu_num_draft_tokens, accepted, target_argmax, bonus_token_ids, wanted)


def random(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform_probs: torch.Tensor,
    is_greedy: torch.Tensor,
    max_spec_len: int,
    vocab_size: int,
    synthetic_conditional_rates: Any = None,
    NO_DRAFT_PROBS: bool = False,
    SYNTHETIC_MODE: bool = False,
) -> None:
    """Accept draft x where target(x) / draft(x) >= u; a rejected position gets the token recovered for it."""
    if SYNTHETIC_MODE:
        raise NotImplementedError(
            "synthetic acceptance is a benchmark mode that DeepInfer's CPU platform does not have"
        )
    drafted = draft_token_ids.long().clamp_min(0)[:, None]
    target = target_probs.gather(1, drafted)[:, 0].double()
    draft = torch.ones_like(target) if draft_probs is None else draft_probs.gather(1, drafted)[:, 0].double()
    accepted = (draft_token_ids >= 0) & (draft > 0) & (target >= uniform_probs * draft)
    tokens = torch.where(accepted, draft_token_ids.long(), recovered_token_ids.long())
    _emit(output_token_ids, cu_num_draft_tokens, accepted, tokens, bonus_token_ids, ~is_greedy)


def recover(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inv_q: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int | None = None,
    NO_DRAFT_PROBS: bool = False,
    USE_FP64_GUMBEL: bool = False,
) -> None:
    """Draw a token from max(target - draft, 0) for every position: argmax of p / q with q exponential (Gumbel's trick)."""
    request, _, _ = owners(cu_num_draft_tokens)
    if draft_probs is None:  # one-hot drafts: the target without the drafted token
        residual = target_probs.clone()
        residual.scatter_(1, draft_token_ids.long().clamp_min(0)[:, None], 0)
    else:
        residual = (target_probs - draft_probs).clamp_min(0)
    output_token_ids.copy_((residual * inv_q[request]).argmax(1).to(output_token_ids.dtype))


def expand(
    output: torch.Tensor,
    input: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat each request's value for each of its tokens, one value replaced by another."""
    request, _, _ = owners(cu_num_tokens)
    values = torch.where(input == replace_from, torch.as_tensor(replace_to, dtype=input.dtype), input)
    output[: len(request)] = values[request].to(output.dtype)


# By the name of the function in `vllm.utils.cpu_triton_utils` that each stands for.
KERNELS = {
    "_rejection_greedy_sample_kernel_impl": greedy,
    "_rejection_random_sample_kernel_impl": random,
    "_sample_recovered_tokens_kernel_impl": recover,
    "_expand_kernel_impl": expand,
}
