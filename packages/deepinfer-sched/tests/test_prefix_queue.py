import pytest
from deepinfer_sched.errors import SchedConfigError
from deepinfer_sched.prefix_queue import PrefixQueue
from hypothesis import given
from hypothesis import strategies as st


def drain(queue):
    return [queue.pop() for _ in range(len(queue))]


def test_requests_of_a_prefix_leave_together():
    queue = PrefixQueue()
    for item, key in [("a1", b"aa1"), ("b1", b"bb1"), ("a2", b"aa2"), ("b2", b"bb2"), ("a3", b"aa3")]:
        queue.push(item, key)
    assert drain(queue) == ["a1", "a2", "a3", "b1", "b2"]


def test_arrivals_join_the_running_round():
    queue = PrefixQueue()
    queue.push("b1", b"b1")
    queue.push("c1", b"c1")
    assert queue.pop() == "b1"
    queue.push("a1", b"a1")
    queue.push("b2", b"b2")
    assert drain(queue) == ["b2", "c1", "a1"]


def test_what_is_put_in_front_comes_first():
    queue = PrefixQueue()
    queue.push("a", b"a")
    queue.push_front("later")
    queue.push_front("first")
    assert list(queue) == ["first", "later", "a"]
    assert drain(queue) == ["first", "later", "a"]


def test_a_fed_prefix_cannot_starve_another():
    queue = PrefixQueue(patience=5)
    queue.push("z", b"z")
    for i in range(100):
        queue.push(f"a{i}", b"a" + i.to_bytes(2, "big"))
        taken = queue.pop()
        if taken == "z":
            break
    assert i <= 6


def test_patience_must_be_positive():
    with pytest.raises(SchedConfigError, match="patience"):
        PrefixQueue(patience=0)


def test_removing_what_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="deque"):
        PrefixQueue().remove("x")
    with pytest.raises(IndexError):
        PrefixQueue().pop()


operations = st.lists(
    st.tuples(st.sampled_from(["push", "pop", "front", "remove"]), st.binary(max_size=3), st.integers(0, 30)),
    max_size=60,
)


@given(operations, st.integers(1, 8))
def test_behaves_like_a_list_searched_by_hand(steps, patience):
    queue, pending, front = PrefixQueue(patience), [], []
    last, pops = b"", 0
    for number, (what, key, pick) in enumerate(steps):
        if what == "push":
            pending.append((key, number, pops + len(pending) + patience))
            queue.push(number, key)
        elif what == "front":
            front.insert(0, number)
            queue.push_front(number)
        elif what == "remove" and pending:
            victim = pending.pop(pick % len(pending))
            queue.remove(victim[1])
        elif what == "pop" and front:
            assert queue.peek() == front[0]
            assert queue.pop() == front.pop(0)
        elif what == "pop" and pending:
            oldest = min(pending, key=lambda e: e[1])
            ahead = [e for e in pending if e[0] >= last] or pending
            wanted = oldest if oldest[2] <= pops else min(ahead)
            assert queue.peek() == wanted[1]
            assert queue.pop() == wanted[1]
            pending.remove(wanted)
            last, pops = wanted[0], pops + 1
        assert len(queue) == len(pending) + len(front)
        assert sorted(queue) == sorted([e[1] for e in pending] + front)
