"""The custom ops that vLLM's CPU code path calls and that a CUDA wheel does not carry, written in torch.

Each is registered as `torch.ops._C.<name>` with the signature of vLLM 0.33's C++ op of that name.
"""

from __future__ import annotations

import functools

import torch

PAD_SLOT = -1


def init_cpu_memory_env(nodes: list[int]) -> None:
    """Bind allocations to memory nodes: left to the operating system here."""


def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's maximum, the lowest on ties: float [n, vocab] -> int64 [n]."""
    return logits.argmax(dim=-1).view(-1)


def gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Draw one token a row from softmax(logits): argmax of logit + Gumbel noise, each row with a stream of its own.

    Args:
        logits: float32 [n, vocab]; -inf for tokens that must not be drawn.
        seeds: int64 [n].

    Returns:
        int64 [n].
    """
    noise = torch.empty_like(logits)
    generator = torch.Generator()
    for row, seed in enumerate(seeds.tolist()):
        noise[row].exponential_(generator=generator.manual_seed(seed))
    return (logits - noise.log()).argmax(dim=-1).view(-1)


def compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """Write the cache slot of every token of the batch into `slot_mapping`; the tail becomes `PAD_SLOT`.

    Args:
        query_start_loc: int32 [num_reqs + 1], first token of each request in the flattened batch.
        positions: int64 [>= num_tokens], position of each token in its request.
        block_table: int32 [>= num_reqs, max_blocks].
        slot_mapping: int64 [max_tokens], written in place: block * block_size + offset.
        block_size: tokens a block.
    """
    num_reqs = query_start_loc.numel() - 1
    counts = (query_start_loc[1:] - query_start_loc[:-1]).long()
    num_tokens = int(query_start_loc[-1])
    owners = torch.repeat_interleave(torch.arange(num_reqs), counts, output_size=num_tokens)
    where = positions[:num_tokens].long()
    blocks = block_table[owners, where // block_size].long()
    slot_mapping[:num_tokens] = blocks * block_size + where % block_size
    slot_mapping[num_tokens:].fill_(PAD_SLOT)


_linears: dict[int, tuple[torch.Tensor, bool]] = {}  # handle -> weight and whether oneDNN has packed it


def create_linear(weight: torch.Tensor, cache_size: int) -> int:
    """Keep a weight for `linear` and return its handle.

    A bfloat16 weight is laid out once for oneDNN's AVX-512 or AMX kernels; torch would do it anew at every call.

    Args:
        weight: [in, out], any strides.
        cache_size: shapes whose plans vLLM's op would keep; oneDNN keeps its own here.
    """
    weight = weight.t().contiguous()
    packed = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if packed:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    handle = max(_linears, default=0) + 1
    _linears[handle] = (weight, packed)
    return handle


def linear(output: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor) -> None:
    """Write x @ weight + bias into `output`: x [n, in], output [..., out], the weight that `handle` names."""
    weight, packed = _linears[int(handle)]
    if packed:
        y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    else:
        y = torch.nn.functional.linear(x, weight, bias)
    output.copy_(y.view_as(output))


def release_linear(handle: int) -> None:
    """Forget a weight."""
    _linears.pop(handle, None)


_SCHEMAS = {
    "create_onednn_mm_handler(Tensor weight, int cache_size) -> int": create_linear,
    "onednn_mm(Tensor(a!) output, Tensor x, Tensor? bias, Tensor handle) -> ()": linear,
    "release_dnnl_matmul_handler(int handle) -> ()": release_linear,
    "init_cpu_memory_env(int[] nodes) -> ()": init_cpu_memory_env,
    "greedy_argmax(Tensor logits) -> Tensor": greedy_argmax,
    "fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor": gumbel_argmax,
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
    "Tensor(a!) slot_mapping, int block_size) -> ()": compute_slot_mapping,
}


@functools.cache
def register() -> torch.library.Library:
    """Define the missing ops once a process; an op that the installed build already has is left as it is."""
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in _SCHEMAS.items():
        name = schema.split("(", 1)[0]
        if not hasattr(torch.ops._C, name):
            library.define(schema)
            library.impl(name, function, "CompositeExplicitAutograd")
    return library
