"""Traces: requests as ids of their blocks, one JSON object a line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.lines import read_lines


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests of a trace.

    Attributes:
        blocks: ids of the blocks of each request's prompt.
        tokens: prompt tokens of each request, 0 where the trace does not say.
        outputs: output tokens of each request, 0 where the trace does not say.
    """

    blocks: list[list[int]]
    tokens: list[int]
    outputs: list[int]


def read_trace(path: Path) -> Trace:
    """Read lines of `{"hash_ids": [int, ...], "input_length": int, "output_length": int}`; other keys are ignored.

    Plain, gzip and zstd files are told apart by their first bytes.

    Raises:
        JobError: the file cannot be read, or a line is not such an object (the message names the line).
    """
    if not path.is_file():
        raise JobError(f"trace {path} does not exist" if not path.exists() else f"trace {path} is not a file")
    trace = Trace([], [], [])
    for line in read_lines(path):
        try:
            value = orjson.loads(line.raw)
            ids = value["hash_ids"]
            if not isinstance(ids, list) or not all(type(block) is int and -(2**63) <= block < 2**63 for block in ids):
                raise TypeError
            lengths = [value.get(key, 0) for key in ("input_length", "output_length")]
            if not all(type(length) is int and length >= 0 for length in lengths):
                raise TypeError
        except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise JobError(
                f"line {line.number} of {path} is not a trace line; it must look like "
                '{"hash_ids": [0, 1, 2], "input_length": 1500, "output_length": 20}'
            ) from error
        trace.blocks.append(ids)
        trace.tokens.append(lengths[0])
        trace.outputs.append(lengths[1])
    if not trace.blocks:
        raise JobError(f"trace {path} has no requests")
    return trace
