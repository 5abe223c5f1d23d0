"""The first pass over INPUT: how many lines, which repeat a custom_id, which ask for the same greedy answer."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_offline.job.errors import LineError
from deepinfer_offline.job.lines import Line
from deepinfer_offline.job.request import name_of, parse_request, read_object
from deepinfer_offline.job.task import greedy_key

_EMPTY = bytes(16)
_TICK = 4096  # lines between two calls of `progress`


@dataclass(frozen=True, slots=True)
class JobIndex:
    """What the first pass keeps: under 100 bytes a line, whatever the lines hold.

    A *record* is a line that is not blank; records are counted from 0.

    Attributes:
        numbers: int64 [records], each record's line number.
        same_id: int64 [records], the first record with the same custom_id, or -1 for that first one itself.
        same_answer: int64 [records], the first record that asks for the same greedy answer, or -1.
        bad: records that are wrong in themselves, repeated custom_ids included.
        digest: of all records, the fingerprint of INPUT.
    """

    numbers: NDArray[np.int64]
    same_id: NDArray[np.int64]
    same_answer: NDArray[np.int64]
    bad: int
    digest: str

    def __len__(self) -> int:
        return len(self.numbers)


def scan(lines: Iterable[Line], progress: Callable[[int], None] | None = None) -> JobIndex:
    """Read all lines once.

    Args:
        lines: the lines of INPUT.
        progress: called now and then with the number of lines read.

    Returns:
        The index. Repetitions are found by 128-bit hashes, so that memory does not grow with the lines' contents.
    """
    numbers = array("q")
    ids, answers = bytearray(), bytearray()
    bad = array("b")
    digest = hashlib.blake2b(digest_size=16)
    for line in lines:
        numbers.append(line.number)
        digest.update(b"%d\n" % len(line.raw))
        digest.update(line.raw)
        id_hash, answer_hash, is_bad = _judge(line)
        ids += id_hash
        answers += answer_hash
        bad.append(is_bad)
        if progress is not None and len(numbers) % _TICK == 0:
            progress(len(numbers))
    same_id = first_equal(ids)
    is_bad = np.frombuffer(bad, dtype=np.bool_) | (same_id >= 0) if len(bad) else np.zeros(0, dtype=np.bool_)
    answers_of_good = np.frombuffer(bytes(answers), dtype=np.uint64).reshape(-1, 2).copy()
    answers_of_good[is_bad] = 0
    same_answer = first_equal(answers_of_good.tobytes())
    return JobIndex(np.array(numbers, dtype=np.int64), same_id, same_answer, int(is_bad.sum()), digest.hexdigest())


def first_equal(hashes: bytes | bytearray) -> NDArray[np.int64]:
    """For every 16-byte hash, the index of the first equal one before it, or -1; all-zero hashes equal nothing."""
    pairs = np.frombuffer(bytes(hashes), dtype=np.uint64).reshape(-1, 2)
    result = np.full(len(pairs), -1, dtype=np.int64)
    if len(pairs) < 2:
        return result
    order = np.lexsort((pairs[:, 0], pairs[:, 1]))  # stable: equal hashes stay in file order
    ordered = pairs[order]
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    starts = np.flatnonzero(new)
    first = order[starts[np.cumsum(new) - 1]]
    result[order] = np.where(first == order, -1, first)
    result[(pairs == 0).all(axis=1)] = -1
    return result


def _judge(line: Line) -> tuple[bytes, bytes, bool]:
    id_hash = _EMPTY
    try:
        value = read_object(line)
        id_hash = _hash_id(name_of(value))
        return id_hash, greedy_key(parse_request(value)) or _EMPTY, False
    except LineError as error:
        return _hash_id(error.custom_id) if error.custom_id and error.owns_id else id_hash, _EMPTY, True
    except Exception:  # a fault of ours: the second pass answers the line with it
        return id_hash, _EMPTY, True


def _hash_id(name: str | None) -> bytes:
    if name is None or not name.strip():
        return _EMPTY
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
