"""The CPU workloads as token ids, and one engine's timings of them; run as a script inside each engine's environment.

It is started once an engine by `cpu.py`, prints one JSON line a measurement, and imports nothing but that engine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable

CASES = ("shared", "unique", "single")
_FIRST, _LAST = 100, 49000  # ids drawn from the vocabulary of SmolLM2, special tokens left out

Generate = Callable[[list[list[int]], int], int]
"""(prompts, new tokens each) -> tokens made."""


def workload(case: str, seed: int = 0) -> tuple[list[list[int]], int]:
    """Prompts as token ids, and new tokens for each.

    `shared`: 64 prompts in 8 groups of 384 common + 32 own tokens; `unique`: 64 of 128 tokens; `single`: one of 128.
    """
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(_FIRST, _LAST) for _ in range(count)]

    if case == "shared":
        heads = [ids(384) for _ in range(8)]
        found, new = [heads[i % 8] + ids(32) for i in range(64)], 64
    elif case == "unique":
        found, new = [ids(128) for _ in range(64)], 64
    elif case == "single":
        found, new = [ids(128)], 128
    else:
        raise ValueError(f"no workload {case!r}; there are {', '.join(CASES)}")
    draw.shuffle(found)
    return found, new


def start_deepinfer(model: str) -> Generate:
    """DeepInfer's own engine through its Python interface. Its answers are detokenised; the peers' are not."""
    from deepinfer_offline import LLM, SamplingParams

    llm = LLM(model, engine="native", device="cpu", dtype="bfloat16", max_model_len=1024, max_num_batched_tokens=2048)

    def generate(prompts: list[list[int]], new: int) -> int:
        params = SamplingParams(max_tokens=new, min_tokens=new, temperature=0, ignore_eos=True)
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    return generate


def start_vllm(model: str) -> Generate:
    """vLLM's CPU build."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    llm = LLM(model, max_model_len=1024, dtype="bfloat16", max_num_seqs=64, max_num_batched_tokens=2048)

    def generate(prompts: list[list[int]], new: int) -> int:
        params = SamplingParams(max_tokens=new, min_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in found)

    return generate


def start_transformers(model: str) -> Generate:
    """transformers' `generate` in batches of 32 (every prompt of a workload has the same length)."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def generate(prompts: list[list[int]], new: int) -> int:
        made = 0
        for start in range(0, len(prompts), 32):
            x = torch.tensor(prompts[start : start + 32])
            with torch.no_grad():
                y = net.generate(
                    x,
                    attention_mask=torch.ones_like(x),
                    max_new_tokens=new,
                    min_new_tokens=new,
                    do_sample=False,
                    pad_token_id=0,
                )
            made += (y.shape[1] - x.shape[1]) * y.shape[0]
        return made

    return generate


ENGINES: dict[str, Callable[[str], Generate]] = {
    "deepinfer": start_deepinfer,
    "vllm": start_vllm,
    "transformers": start_transformers,
}


def main() -> None:
    """Start one engine, measure each case `--rounds` times, print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=list(ENGINES), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="first seed; each round takes the next one")
    parser.add_argument("--spawned", type=float, default=0.0, help="time.time() of the start of this process")
    asked = parser.parse_args()
    generate = ENGINES[asked.engine](asked.model)
    generate([list(range(200, 230))], 1)
    print(json.dumps({"engine": asked.engine, "start_s": round(time.time() - asked.spawned, 2)}), flush=True)
    generate([list(range(300, 330))], 32)  # one decode of some length before anything is timed
    for place in range(asked.rounds):
        for case in asked.cases.split(","):
            prompts, new = workload(case, asked.seed + place)
            start = time.perf_counter()
            made = generate(prompts, new)
            seconds = time.perf_counter() - start
            line = {"engine": asked.engine, "case": case, "s": round(seconds, 3), "tokens_out": made}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
