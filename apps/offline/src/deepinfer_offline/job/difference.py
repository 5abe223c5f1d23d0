"""Why a finished OUTPUT is not the result of this job: what its lines say of the job that they were made by."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from deepinfer_offline.engine.options import DEVICES, DTYPES, ENGINES, ON_UNSUPPORTED, SPECULATIVE, WINDOW_STRATEGIES
from deepinfer_offline.job.answer import line_id
from deepinfer_offline.job.codec import loads
from deepinfer_offline.job.errors import LineError, show
from deepinfer_offline.job.lines import Line
from deepinfer_offline.job.options import JobOptions, fingerprint
from deepinfer_offline.job.request import name_of, read_object

_VALUES: dict[str, tuple[str | int, ...]] = {
    "engine": ENGINES,
    "device": DEVICES,
    "dtype": DTYPES,
    "seed": tuple(range(100)),
    "max-model-len": (0, *(1 << power for power in range(8, 21))),
    "speculative": SPECULATIVE,
    "window-strategy": WINDOW_STRATEGIES,
    "on-unsupported": ON_UNSUPPORTED,
    "decoder-replay": ("on", "off"),
    "engine-arg": ("",),
}
"""What an option may have been. OUTPUT keeps a digest of a job's options, so the former ones can only be guessed."""

_CHANGES = 2  # options that may differ at the same time
_LONG = 1 << 20  # bytes of a line for which every guess takes long: only one option may differ


def describe_difference(options: JobOptions, line: Line, raw: bytes, *, others_fit: bool) -> str:
    """What keeps an OUTPUT line from answering an input line; no sentence, no full stop.

    Args:
        options: of this job.
        line: of the input.
        raw: the line in its place in OUTPUT.
        others_fit: whether other lines of OUTPUT answer theirs with these options.
    """
    try:
        value = loads(raw)
        found = str(value["id"])
        name, body = value["custom_id"], (value["response"] or {}).get("body")
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its form: it is not a line that deepinfer writes"
    try:
        wanted = name_of(read_object(line))
    except LineError as error:
        wanted = error.custom_id
    if name != wanted:
        return f"the input: it answers custom_id {show(name)} and line {line.number} of the input has {show(wanted)}"
    if others_fit:
        return f"the input: line {line.number} asks for something else now"
    for changes in _guesses(options, _CHANGES if len(line.raw) < _LONG else 1):
        if found == f"batch_req_{line_id(fingerprint(options.answer_options() | dict(changes)), line)}":
            now = options.answer_options()
            said = (f"--{flag} was {_word(value)} and is {_word(now[flag])}" for flag, value in changes)
            return f"an option: {', '.join(said)}"
    model, names = body.get("model") if isinstance(body, dict) else None, {name.casefold() for name in options.names()}
    if isinstance(model, str) and model.casefold() not in names:
        return f"the model: it was made by {show(model)} and this run's is {show(options.engine.model)}"
    return f"the text of line {line.number} of the input, the model's files, or several of --{', --'.join(_VALUES)}"


def _guesses(options: JobOptions, most: int) -> Iterator[tuple[tuple[str, str | int], ...]]:
    now = options.answer_options()
    single = [(flag, value) for flag, values in _VALUES.items() for value in values if value != now[flag]]
    for size in range(1, most + 1):
        for changes in itertools.combinations(single, size):
            if len({flag for flag, _ in changes}) == size:
                yield changes


def _word(value: str | int) -> str:
    return str(value) if value != "" else "not given"
