"""`--ray N`: N engines on the machines of a Ray cluster, seen by the job layer as one engine."""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from deepinfer_offline.engine.base import Engine, EngineInfo, EngineStats, Request, RequestError, RequestOutput
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.job.errors import JobError

RUN = 16
"""Requests in a row that go to one engine: neighbours in the job's order share prefixes, and a cache is one engine's."""
SLICE_SECONDS = 0.5
_WAIT_SECONDS = 1.0


class Worker:
    """One engine, in a process of its own. Its methods are called through Ray."""

    def __init__(self, make_engine: Callable[[EngineOptions], Engine], options: EngineOptions) -> None:
        self._engine = make_engine(options)

    def info(self) -> EngineInfo:
        """Facts of the engine."""
        return self._engine.info

    def work(self, requests: list[Request]) -> tuple[list[RequestOutput], bool, EngineStats]:
        """Queue requests and run for a moment.

        Args:
            requests: what to add.

        Returns:
            What finished, whether something is unfinished, and the counters.
        """
        done: list[RequestOutput] = []
        for request in requests:
            try:
                self._engine.add_request(request)
            except RequestError as error:
                done.append(RequestOutput(request.request_id, request.prompt_token_ids, [], error=error))
        end = time.monotonic() + SLICE_SECONDS
        while self._engine.has_unfinished() and time.monotonic() < end:
            done.extend(self._engine.step())
        return done, self._engine.has_unfinished(), self._engine.stats()

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


class _Member:
    """What the fleet knows of one worker."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.queue: list[Request] = []
        self.unfinished: set[str] = set()
        self.call: Any = None
        self.stats = EngineStats()


class Fleet:
    """Implements the Engine protocol over workers.

    Args:
        options: how each engine is built; the model must be there on every machine.
        count: how many engines.
        make_engine: builds one; it is called on the workers.
        tokenizer: of the model, for this process.
        ray: the module `ray`.

    Raises:
        JobError: the cluster has no room for the engines, or one of them cannot start.
    """

    def __init__(
        self,
        options: EngineOptions,
        count: int,
        make_engine: Callable[[EngineOptions], Engine],
        tokenizer: Any,
        ray: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self._ray = ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        needs = _resources(ray.cluster_resources(), options, count)
        remote = ray.remote(**needs)(Worker)
        self._members = [_Member(remote.remote(make_engine, options)) for _ in range(count)]
        infos = [self._get(member, member.actor.info.remote()) for member in self._members]
        self.info = replace(
            infos[0], kv_tokens=sum(i.kv_tokens for i in infos), kv_bytes=sum(i.kv_bytes for i in infos)
        )
        self._current = self._members[0]
        self._in_a_row = 0

    def add_request(self, request: Request) -> None:
        """Queue a request: runs of `RUN` go to the engine that has least to do. A refusal comes as an output."""
        if self._in_a_row >= RUN:
            self._current = min(self._members, key=lambda member: len(member.unfinished))
            self._in_a_row = 0
        self._in_a_row += 1
        self._current.queue.append(request)
        self._current.unfinished.add(request.request_id)

    def abort(self, request_id: str) -> None:
        """Not needed by the job layer: a job that stops closes its engines."""
        raise NotImplementedError(f"request {request_id} runs on another machine and cannot be taken back")

    def step(self) -> list[RequestOutput]:
        """Hand out what is queued; return what finished since."""
        for member in self._members:
            if member.call is None and member.unfinished:
                queue, member.queue = member.queue, []
                member.call = member.actor.work.remote(queue)
        running = {member.call: member for member in self._members if member.call is not None}
        if not running:
            return []
        ready, _ = self._ray.wait(list(running), num_returns=1, timeout=_WAIT_SECONDS)
        return [output for call in ready for output in self._collect(running[call])]

    def has_unfinished(self) -> bool:
        """Whether a request has not come back."""
        return any(member.unfinished for member in self._members)

    def stats(self) -> EngineStats:
        """The counters of all engines, added up; seconds too, so they are seconds of engines, not of the clock."""
        total = EngineStats()
        for field in fields(EngineStats):
            if field.name != "extra":
                setattr(total, field.name, sum(getattr(member.stats, field.name) for member in self._members))
        notes: Counter[str] = Counter()
        for member in self._members:
            notes.update(member.stats.extra.get("grammar_notes", {}))
        if notes:
            total.extra["grammar_notes"] = dict(notes)
        return total

    def close(self) -> None:
        """Stop the engines."""
        for member in self._members:
            self._ray.kill(member.actor)

    def _collect(self, member: _Member) -> list[RequestOutput]:
        done, unfinished, member.stats = self._get(member, member.call)
        member.call = None
        member.unfinished.difference_update(output.request_id for output in done)
        if not unfinished and len(member.unfinished) > len(member.queue):
            raise JobError(f"an engine of --ray lost {len(member.unfinished) - len(member.queue)} requests")
        return done

    def _get(self, member: _Member, call: Any) -> Any:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            place = self._members.index(member) + 1
            cause = getattr(error, "cause", None) or error
            raise JobError(f"engine {place} of --ray failed: {cause}") from error


def open_fleet(options: EngineOptions, count: int, make_engine: Callable[[EngineOptions], Engine]) -> Fleet:
    """Start N engines on the Ray cluster that this machine belongs to, or on this machine alone.

    Raises:
        JobError: Ray is not installed, or an engine cannot start.
        EngineStartError: the model cannot be found here.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise JobError("--ray needs Ray: pip install ray") from None
    from deepinfer_offline.text.tokenizer import load_tokenizer
    from deepinfer_offline.weights.source import resolve_model

    source = resolve_model(options.model)
    return Fleet(options, count, make_engine, load_tokenizer(source.path, name=source.name), ray)


def _resources(cluster: dict[str, float], options: EngineOptions, count: int) -> dict[str, float]:
    """What one engine asks of the cluster: its GPUs if there are any, else its share of the CPUs."""
    gpus, cpus = cluster.get("GPU", 0), cluster.get("CPU", 1)
    if gpus and options.device in ("auto", "cuda"):
        if gpus < count * options.tensor_parallel_size:
            raise JobError(
                f"--ray {count} with --tensor-parallel {options.tensor_parallel_size} needs "
                f"{count * options.tensor_parallel_size} GPUs; the Ray cluster has {gpus:g}"
            )
        return {"num_gpus": options.tensor_parallel_size, "num_cpus": 1}
    if cpus < count:
        raise JobError(f"--ray {count} needs {count} CPUs; the Ray cluster has {cpus:g}")
    return {"num_cpus": cpus // count}
