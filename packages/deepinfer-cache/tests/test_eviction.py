"""Which page goes first, against plain lists."""

from __future__ import annotations

from deepinfer_cache.eviction import LruEvictor, NextUseEvictor
from hypothesis import given
from hypothesis import strategies as st

actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 7)),
        st.tuples(st.just("remove"), st.integers(0, 7)),
        st.tuples(st.just("pop"), st.just(0)),
        st.tuples(st.just("expect"), st.tuples(st.integers(0, 7), st.integers(0, 9))),
        st.tuples(st.just("meet"), st.tuples(st.integers(0, 7), st.integers(0, 9))),
    ),
    max_size=60,
)


def key(page):
    return bytes([page])


def run(evictor, steps, choose):
    """Play actions on an evictor and on (pages in order of release, future uses), comparing every choice."""
    pages, uses = [], {page: [] for page in range(8)}
    for action, what in steps:
        if action == "add" and what not in pages:
            evictor.add(what, key(what))
            pages.append(what)
        elif action == "remove" and what in pages:
            evictor.remove(what)
            pages.remove(what)
        elif action == "pop" and pages:
            expected = choose(pages, uses)
            assert evictor.pop() == expected
            pages.remove(expected)
        elif action == "expect" and isinstance(evictor, NextUseEvictor):
            page, position = what
            evictor.expect([key(page)], position)
            uses[page].append(position)
        elif action == "meet" and isinstance(evictor, NextUseEvictor):
            page, position = what
            evictor.meet([key(page)], position)
            if position in uses[page]:
                uses[page].remove(position)
        assert len(evictor) == len(pages)
        assert all((page in evictor) == (page in pages) for page in range(8))


@given(actions)
def test_lru_evicts_the_oldest(steps):
    run(LruEvictor(), steps, lambda pages, uses: pages[0])


@given(actions)
def test_next_use_evicts_the_farthest_and_unknown_futures_first(steps):
    def choose(pages, uses):
        return max(pages, key=lambda page: (min(uses[page], default=10**9), -pages.index(page)))

    run(NextUseEvictor(), steps, choose)


def test_next_use_is_lru_when_nothing_is_known():
    evictor = NextUseEvictor()
    for page in (3, 1, 2):
        evictor.add(page, key(page))
    assert [evictor.pop() for _ in range(3)] == [3, 1, 2]


def test_the_heap_does_not_grow_with_outdated_entries():
    evictor = NextUseEvictor()
    for page in range(4):
        evictor.add(page, key(page))
    for position in range(50_000):
        evictor.expect([key(position % 4)], position)
        evictor.meet([key(position % 4)], position)
    assert len(evictor._heap) < 5_000
    assert not evictor._uses
