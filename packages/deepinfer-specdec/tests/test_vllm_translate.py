import numpy as np
from deepinfer_specdec.adapters.vllm.translate import RowTracker


def table(rows, width=40):
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return np.asarray([len(r) for r in rows]), tokens


def step(tracker, rows, which=None):
    lengths, tokens = table(rows)
    return tracker.update(list(range(len(rows))) if which is None else which, lengths, tokens)


def test_a_row_that_grows_stays_the_same_sequence():
    tracker = RowTracker()
    assert step(tracker, [[1, 2, 3], [4, 5]]) == ([(0, 0), (1, 0)], [])
    assert step(tracker, [[1, 2, 3, 9], [4, 5, 6, 7]]) == ([(0, 3), (1, 2)], [])


def test_a_moved_row_is_recognised():
    tracker = RowTracker()
    step(tracker, [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert step(tracker, [[7, 8, 9, 1], [4, 5, 6, 2]]) == ([(2, 3), (1, 3)], [0])


def test_a_new_request_in_an_old_row_is_new():
    tracker = RowTracker()
    step(tracker, [[1, 2, 3]])
    assert step(tracker, [[1, 2, 4, 5]]) == ([(1, 0)], [0])


def test_a_row_that_skips_a_step_is_followed_anew():
    tracker = RowTracker()
    step(tracker, [[1, 2], [3, 4]])
    assert step(tracker, [[1, 2, 5], [3, 4]], which=[0]) == ([(0, 2)], [1])
    assert step(tracker, [[1, 2, 5], [3, 4, 6]]) == ([(0, 3), (2, 0)], [])


def test_equal_sequences_do_not_share_a_name():
    tracker = RowTracker()
    first, _ = step(tracker, [[1, 2], [1, 2]])
    again, gone = step(tracker, [[1, 2, 3], [1, 2, 4]])
    assert {name for name, _ in first} == {name for name, _ in again} == {0, 1}
    assert gone == []
