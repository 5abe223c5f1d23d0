"""deepinfer-cache with a model whose windows vLLM rebuilds by replay (DeepSig V4.1): the prefix is loaded, the window replayed.

Such a model does not run on a CPU, so vLLM's own scheduler is driven here, with the connector on both sides of it.
"""

from collections.abc import Callable

import pytest
import torch
from vllm import SamplingParams

pytestmark = pytest.mark.vllm

BLOCK, WINDOW, BLOCKS, PROMPT = 16, 32, 64, 200
HIT = (PROMPT - 1) // BLOCK * BLOCK  # 192: one token at least is left to compute


class Side:
    """vLLM's scheduler and one worker's connector, in a process that has just started."""

    def __init__(self, folder, store):
        from deepinfer_cache.adapters.vllm.connector import DeepInferConnector
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec, SlidingWindowMLASpec
        from vllm.v1.structured_output import StructuredOutputManager

        transfer = KVTransferConfig(
            kv_connector="DeepInferConnector",
            kv_role="kv_both",
            kv_connector_module_path="deepinfer_cache.adapters.vllm.connector",
            kv_connector_extra_config={"directory": str(store), "host_bytes": 0},
        )
        arguments = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, max_model_len=512, max_num_seqs=4, block_size=BLOCK,
            kv_transfer_config=transfer,
        )  # fmt: skip
        config = arguments.create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        groups = [
            KVCacheGroupSpec(["prefix"], MLAAttentionSpec(**shape)),
            KVCacheGroupSpec(["window"], SlidingWindowMLASpec(**shape, sliding_window=WINDOW, bounded_replay=True)),
        ]
        cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = AsyncScheduler(config, cache, StructuredOutputManager(config), BLOCK)
        self.worker = DeepInferConnector(config, KVConnectorRole.WORKER, cache)
        self.tensors = {name: torch.zeros(BLOCKS, 1, BLOCK, 8) for name in ("prefix", "window")}
        self.worker.register_kv_caches(self.tensors)

    def request(self, name):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        params = SamplingParams(max_tokens=2, temperature=0)
        params.update_from_generation_config({}, 2)
        request = Request(
            name, list(range(3, 3 + PROMPT)), params, None, block_hasher=get_request_block_hasher(BLOCK, sha256)
        )
        self.scheduler.add_request(request)
        return request

    def step(self, fill: Callable[[int], float] | None = None):
        """Plan a step, let the worker move pages around the (imagined) forward pass, report; returns what was planned."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        plan = self.scheduler.schedule()
        if fill is not None:
            blocks = plan.scheduled_new_reqs[0].block_ids[0]
            for page, block in enumerate(blocks):
                self.tensors["prefix"][block] = fill(page)
        self.worker.bind_connector_metadata(plan.kv_connector_metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        names = list(plan.num_scheduled_tokens)
        moved = KVConnectorOutput(finished_recving=results.finished_recving, failed_recving=results.failed_recving)
        output = ModelRunnerOutput(
            names, {n: i for i, n in enumerate(names)}, [[5]] * len(names), kv_connector_output=moved
        )
        self.scheduler.update_from_output(plan, output)
        return plan


def first_run(folder, store):
    side = Side(folder, store)
    side.request("a")
    plan = side.step(fill=lambda page: float(page + 1))
    assert plan.num_scheduled_tokens == {"a": PROMPT}


def test_the_prefix_is_loaded_and_the_window_is_replayed(tiny_llama, tmp_path):
    first_run(tiny_llama, tmp_path)
    assert len(list(tmp_path.glob("*/*/*.kv"))) == PROMPT // BLOCK  # the window's pages are not stored
    side = Side(tiny_llama, tmp_path)
    request = side.request("b")
    loading = side.step()
    assert loading.total_num_scheduled_tokens == 0
    assert len(loading.kv_connector_metadata.transfers.loads["b"]) == HIT // BLOCK
    plan = side.step()
    assert request.replay_start == HIT - WINDOW
    assert plan.num_scheduled_tokens == {"b": PROMPT - HIT + WINDOW}  # the window is computed again
    blocks = plan.scheduled_new_reqs[0].block_ids[0]
    for page in range(HIT // BLOCK):
        assert (side.tensors["prefix"][blocks[page]] == page + 1).all()


def test_a_damaged_page_is_computed_again_and_nothing_is_replayed_from_it(tiny_llama, tmp_path):
    first_run(tiny_llama, tmp_path)
    page = sorted(tmp_path.glob("*/*/*.kv"))[3]
    whole = page.read_bytes()
    page.write_bytes(whole[:-1])
    side = Side(tiny_llama, tmp_path)
    side.request("b")
    assert side.step().total_num_scheduled_tokens == 0
    plan = side.step(fill=lambda page: float(page + 1))
    assert plan.num_scheduled_tokens == {"b": PROMPT}
    assert page.read_bytes() == whole  # written again
