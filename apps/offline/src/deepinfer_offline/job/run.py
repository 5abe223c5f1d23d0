"""A whole job, from INPUT to OUTPUT."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepinfer_offline.engine.base import Engine
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.job.answer import OK, Stamp
from deepinfer_offline.job.errors import JobError, JobStopped
from deepinfer_offline.job.feed import Feed
from deepinfer_offline.job.journal import Journal
from deepinfer_offline.job.lock import open_locked
from deepinfer_offline.job.loop import MAX_IN_FLIGHT, JobLoop, Tally
from deepinfer_offline.job.options import JobOptions, fingerprint
from deepinfer_offline.job.output import compare_finished, read_finished, write_output
from deepinfer_offline.job.places import check_places
from deepinfer_offline.job.prepare import Preparer
from deepinfer_offline.job.progress import Reporter
from deepinfer_offline.job.report import Facts
from deepinfer_offline.job.scan import JobIndex, scan
from deepinfer_offline.job.source import Source
from deepinfer_offline.job.stop import StopFlag
from deepinfer_offline.job.window import WindowMaker
from deepinfer_offline.job.work import Work

_WORDS = {"loading": "loading model"}
MakeEngine = Callable[[EngineOptions], Engine]


class Job:
    """One run of a job.

    Args:
        options: what to do.
        make_engine: builds the engine; called only if there is something to compute.
        reporter: is told what happens.
        check_engine: raises for an engine that cannot be built, before INPUT is read; not called where an
            earlier run may have done all.
    """

    def __init__(
        self,
        options: JobOptions,
        make_engine: MakeEngine,
        reporter: Reporter,
        check_engine: Callable[[EngineOptions], None] | None = None,
    ) -> None:
        self.facts = Facts(options.input, str(options.output), options=_shown(options))
        self._options = options
        self._make_engine, self._check_engine = make_engine, check_engine
        self._reporter = reporter
        self._created = 0
        self._asked: dict[str, str | int] = {}

    def run(self) -> Facts:
        """Do the job.

        Returns:
            What was done; OUTPUT is there.

        Raises:
            JobError: the job cannot start or go on; one sentence says why.
            JobStopped: the user interrupted it; the journal keeps what is done.
            EngineStartError: the engine cannot start.
        """
        options = self._options
        self._created = _now()
        check_places(options)
        source = Source(options.input)
        try:
            if source.ignored_columns:
                self._reporter.note(f"columns without a meaning here are ignored: {', '.join(source.ignored_columns)}")
            with self._locked_journal() as journal:
                if self._check_engine is not None and (options.fresh or not self._may_be_done(journal)):
                    with self._phase("checking"):
                        self._check_engine(options.engine)
                self._run(source, journal)
        finally:
            source.close()
        return self.facts

    def _run(self, source: Source, journal: Journal) -> None:
        options, facts = self._options, self.facts
        with self._phase("reading"):
            self._asked = options.answer_options()  # once: the model's files may be replaced while it runs
            index = scan(source.lines(), self._reporter.update)
            facts.records = len(index)
            if self._is_finished(source, journal, index):
                return
            self._recover(journal, index)
        if not len(index):
            self._reporter.note(f"{source.name} holds no requests")
        if index.bad:
            self._reporter.note(f"{index.bad:,} of {len(index):,} lines are wrong and will be answered with an error")
        work = Work.of(index, journal)
        if work.todo.any():
            self._compute(source, journal, index, work)
        with self._phase("writing", len(index)):
            job = fingerprint(self._asked)
            written = write_output(options.output, journal, index, source.lines(), job, self._reporter.update)
        facts.answered, facts.failed, facts.deduplicated = written.answered, written.failed, written.copied
        facts.finished = True

    def _may_be_done(self, journal: Journal) -> bool:
        """Whether an earlier run may have left nothing for an engine to do."""
        return self._options.output.exists() or bool(journal.read_header())

    def _is_finished(self, source: Source, journal: Journal, index: JobIndex) -> bool:
        """Whether an earlier run finished this job and nothing is asked of this one."""
        options, facts = self._options, self.facts
        if options.fresh or not options.output.exists() or journal.read_header():
            return False
        if options.retry_errors and self._adopt(source, journal, index):
            return False
        statuses = [status for status, _ in read_finished(options.output, source.lines(), options)]
        failed = sum(status != OK for status in statuses)
        facts.resumed, facts.finished = len(statuses), True
        facts.answered, facts.failed = len(statuses) - failed, failed
        again = f"; {failed:,} failed, --retry-errors tries them again" if failed else ""
        self._reporter.note(f"{options.output} is done already: {facts.answered:,} lines answered{again}")
        return True

    def _adopt(self, source: Source, journal: Journal, index: JobIndex) -> bool:
        """Start a journal with the good answers of a finished OUTPUT, whose failed lines may have been corrected.

        Returns:
            False, and nothing is done, if none fits or all is answered.
        """
        options = self._options
        kinds = Counter(kind for kind, _ in compare_finished(options.output, source.lines(), options))
        is_other_job = not kinds["kept"] and (kinds["stale"] or kinds["foreign"])
        if is_other_job or kinds == Counter(kept=len(index)):
            return False
        if kinds["stale"]:
            self._reporter.note(
                f"{kinds['stale']:,} answers in {options.output} no longer fit the input and are dropped"
            )
        journal.start(self._header(index), len(index))
        for record, (kind, result) in enumerate(compare_finished(options.output, source.lines(), options)):
            if kind == "kept" and index.same_id[record] < 0:  # a corrected line may have taken the name of a later one
                journal.append(record, OK, result)
        journal.sync()
        return True

    def _recover(self, journal: Journal, index: JobIndex) -> None:
        """Take over what an earlier run answered. A new journal is not written before the engine stands."""
        options = self._options
        old = {} if options.fresh else journal.read_header()
        if not old:
            journal.allocate(len(index))
            return
        new = self._header(index)
        _check_same(old, new, options)
        if old.get("draft_model") != new["draft_model"]:
            self._reporter.note(
                f"--draft-model was {old.get('draft_model') or 'not given'} and is {new['draft_model'] or 'not given'}: "
                "answers are the model's own with any draft, up to rounding"
            )
        self.facts.resumed = journal.recover(len(index))
        if options.retry_errors:
            self.facts.resumed -= journal.forget(lambda status: status != OK)
        if journal.damaged:
            self._reporter.note(f"{journal.damaged} damaged journal lines are dropped; their requests run again")
        if self.facts.resumed:
            self._reporter.note(f"going on: {self.facts.resumed:,} of {len(index):,} lines were answered before")

    def _compute(self, source: Source, journal: Journal, index: JobIndex, work: Work) -> None:
        options, facts = self._options, self.facts
        with self._phase("loading"):
            engine = self._make_engine(options.engine)
        try:
            facts.info = info = engine.info
            for note in info.notes:
                self._reporter.note(note)
            where = {"engine": info.engine, "dtype": info.dtype, "device": info.device.split(" ")[0]}
            if not journal.header or options.fresh:
                journal.start({**self._header(index), "where": where}, len(index))
            elif journal.header.get("where", where) != where:
                _refuse_other_engine(journal, where)
            stamp = Stamp(fingerprint(self._asked), info.model, int(journal.header["created"]))
            preparer = Preparer(info, engine.tokenizer, (info.model, *options.names()), options.engine.seed)
            by_prefix = options.order == "prefix"
            maker = WindowMaker(index, work.todo, stamp, preparer, block_size=info.block_size, by_prefix=by_prefix)
            facts.bound = maker.bound
            with self._phase("running", len(index)):
                feed = Feed(maker.windows, source.lines())
                try:
                    in_flight = MAX_IN_FLIGHT * max(1, options.ray)
                    loop = JobLoop(engine, feed, journal, stamp, work.lines, in_flight)
                    self._loop(loop, engine, work.done)
                finally:
                    feed.close()
        finally:
            facts.stats = engine.stats()
            engine.close()

    def _loop(self, loop: JobLoop, engine: Engine, done: int) -> None:
        self.facts.tally = loop.tally
        with StopFlag() as stop:

            def each_step(tally: Tally) -> bool:
                stats = engine.stats()
                self._reporter.update(
                    done + tally.lines,
                    tokens=stats.computed_prompt_tokens + stats.cached_tokens + stats.generated_tokens,
                    hit_rate=stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else None,
                    failed=tally.refused + tally.failed,
                )
                return not stop.is_set

            if not loop.run(each_step):
                raise JobStopped

    def _header(self, index: JobIndex) -> dict[str, Any]:
        draft = self._options.engine.draft_model
        return {
            "created": self._created,
            "input": index.digest,
            "records": len(index),
            "options": self._asked,
            "draft_model": None if draft is None else str(draft),
        }

    @contextmanager
    def _phase(self, name: str, total: int | None = None) -> Generator[None]:
        self._reporter.phase(_WORDS.get(name, name), total)
        start = time.monotonic()
        try:
            yield
        finally:
            self.facts.seconds[name] = time.monotonic() - start

    @contextmanager
    def _locked_journal(self) -> Generator[Journal]:
        """The journal; it is removed at the end if OUTPUT is there or if it holds nothing."""
        path = self._options.journal
        fd = open_locked(path, self._options.output)
        try:
            yield Journal(path, fd)
        finally:
            if self.facts.finished or os.fstat(fd).st_size == 0:
                path.unlink(missing_ok=True)
            os.close(fd)


def _now() -> int:
    """When the job begins, seconds since 1970, or what SOURCE_DATE_EPOCH says instead."""
    fixed = os.environ.get("SOURCE_DATE_EPOCH", "")
    if fixed and not (fixed.isascii() and fixed.isdigit()):
        raise JobError(f"SOURCE_DATE_EPOCH is {fixed!r}, not a whole number of seconds since 1970; set one or unset it")
    return int(fixed or time.time())


def _check_same(old: dict[str, Any], new: dict[str, Any], options: JobOptions) -> None:
    """Refuse to go on with a journal of another job."""
    journal = options.journal
    way_out = "run with what it was begun with, choose another output, or start over with --fresh"
    if old.get("input") != new["input"]:
        raise JobError(f"the input changed since {journal} was begun; start over with --fresh or choose another output")
    before, now = old.get("options") or {}, new["options"]
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not changed:
        return
    name = changed[0]
    was, given = str(before.get(name)), str(now.get(name))
    if name == "model" and "#" in was and was.rpartition("#")[0] == given.rpartition("#")[0]:
        raise JobError(f"the files of --model {options.engine.model} changed since {journal} was begun; {way_out}")
    raise JobError(f"{journal} was begun with --{name} {was} and this is {given}; {way_out}")


def _refuse_other_engine(journal: Journal, now: dict[str, str]) -> None:
    """What `auto` stands for differs between machines, and a half of the answers from each is no one's result."""
    before = journal.header["where"]
    changes = ", ".join(
        f"{name} {before.get(name)} then and {now[name]} now" for name in now if before.get(name) != now[name]
    )
    raise JobError(
        f"{journal.path} was begun on another engine ({changes}); name it by flags or start over with --fresh"
    )


def _shown(options: JobOptions) -> dict[str, Any]:
    engine = {name: getattr(options.engine, name) for name in options.engine.__slots__}
    shown = {**engine, "order": options.order, "retry_errors": options.retry_errors, "fresh": options.fresh}
    return {name: str(value) if isinstance(value, Path) else value for name, value in shown.items()}
