import pytest
from deepinfer_cache.adapters.vllm.groups import GroupLayout
from deepinfer_cache.adapters.vllm.ledger import Ledger, Shelf

KEYS = [bytes([i]) * 16 for i in range(6)]
FULL = GroupLayout(index=0, block_size=4, window=None, page_bytes=1)
WINDOW = GroupLayout(index=1, block_size=4, window=5, page_bytes=1)  # a hit of 12 needs tokens 7 .. 11: pages 1 and 2


def matched(book, name, keys, computed, length):
    count = book.match(name, keys, computed, length)
    assert count is not None
    return count


def ledger(on_disk=(), host_pages=100):
    return Ledger([FULL], [Shelf(set(on_disk).__contains__, host_pages)], alignment=4)


def hybrid(full=(), window=()):
    shelves = [Shelf(set(full).__contains__, 100), Shelf(set(window).__contains__, 100)]
    return Ledger([FULL, WINDOW], shelves, alignment=4)


def test_leading_kept_pages_are_found_and_one_token_is_left_to_compute():
    assert ledger(KEYS[:3]).match("r", [KEYS[:4]], computed=0, length=16) == 12
    assert ledger(KEYS[:4]).match("r", [KEYS[:4]], computed=0, length=16) == 12
    assert ledger(KEYS[:4]).match("r", [KEYS[:4]], computed=0, length=17) == 16
    assert ledger([KEYS[0], KEYS[2]]).match("r", [KEYS[:4]], computed=0, length=16) == 4
    assert ledger(KEYS[:4]).match("r", [KEYS[:4]], computed=8, length=17) == 8
    assert ledger(KEYS[:4]).match("r", [KEYS[:4]], computed=7, length=17) == 0


def test_loads_name_the_blocks_behind_the_local_hit():
    book = ledger(KEYS[:4])
    count = matched(book, "r", [KEYS[:4]], 4, 17)
    book.load("r", [[70, 71, 72, 73, 74]], count)
    assert book.take().loads == {"r": [(0, KEYS[i], 70 + i) for i in (1, 2, 3)]}
    assert book.take().loads == {}


def test_each_page_is_saved_once_when_a_step_completes_it():
    book = ledger()
    book.match("r", [KEYS[:3]], 0, 14)
    book.schedule("r", [[5, 6]], True, computed=6)
    assert book.take().saves == [(0, KEYS[0], 5)]
    book.schedule("r", [[7, 8]], False, computed=14)
    assert book.take().saves == [(0, KEYS[1], 6), (0, KEYS[2], 7)]
    book.schedule("r", [[]], False, computed=15)
    assert book.take().saves == []


def test_a_page_of_two_requests_is_saved_by_the_first():
    book = ledger()
    for name, block in (("a", 3), ("b", 9)):
        book.match(name, [KEYS[:1]], 0, 8)
        book.schedule(name, [[block, block + 1]], True, computed=8)
    assert book.take().saves == [(0, KEYS[0], 3)]


def test_host_pages_are_mirrored_up_to_their_number():
    book = Ledger([FULL], [Shelf(None, host_pages=1)], alignment=4)
    book.match("r", [KEYS[:2]], 0, 9)
    book.schedule("r", [[1, 2]], True, computed=8)
    assert len(book.take().saves) == 2
    assert book.match("s", [KEYS[:2]], 0, 9) == 0  # the first page was pushed out by the second
    assert book.match("s", [KEYS[1:2]], 0, 5) == 4


def test_a_resumed_request_starts_with_its_new_blocks():
    book = ledger()
    book.match("r", [KEYS[:2]], 0, 9)
    book.schedule("r", [[1]], True, computed=4)
    book.take()
    book.schedule("r", [[8, 9]], True, computed=8)
    assert book.take().saves == [(0, KEYS[1], 9)]


def test_a_request_waits_for_pages_that_another_one_loads():
    book = ledger(KEYS[:4])
    count = matched(book, "a", [KEYS[:4]], 0, 17)
    book.load("a", [[1, 2, 3, 4, 5]], count)
    assert book.match("b", [KEYS[:4]], 0, 17) is None
    assert book.match("c", [[KEYS[5], *KEYS[:3]]], 0, 17) == 0  # another prompt: its first page is not there
    book.loaded(["a"], failed=set())
    assert book.match("b", [KEYS[:4]], 0, 17) == 16


@pytest.mark.parametrize("ending", ["finish", "fail"])
def test_nobody_waits_for_a_load_that_ended_otherwise(ending):
    book = ledger(KEYS[:4])
    book.load("a", [[1, 2, 3, 4, 5]], matched(book, "a", [KEYS[:4]], 0, 17))
    if ending == "finish":
        book.finish("a")
        assert book.match("b", [KEYS[:4]], 0, 17) == 16
    else:
        book.loaded(["a"], failed={"a"})
        assert book.match("b", [KEYS[:4]], 0, 17) == 0


def test_pages_that_some_worker_cannot_read_are_computed_and_saved_again():
    book = ledger(KEYS[:3])
    book.load("r", [[1, 2, 3, 4]], matched(book, "r", [KEYS[:3]], 0, 13))
    book.take()
    book.loaded(["r"], failed={"r"})
    assert book.match("r", [KEYS[:3]], 0, 13) == 0  # although the files of this worker are there
    book.schedule("r", [[5, 6, 7, 8]], True, computed=13)
    assert book.take().saves == [(0, KEYS[0], 5), (0, KEYS[1], 6), (0, KEYS[2], 7)]
    assert book.match("s", [KEYS[:3]], 0, 13) == 12


def test_tokens_from_host_memory_are_counted():
    book = Ledger([FULL], [Shelf(set(KEYS[:4]).__contains__, 2)], alignment=4)
    book.match("a", [KEYS[:2]], 0, 9)
    book.schedule("a", [[1, 2, 3]], True, computed=9)  # the first two pages are in host memory now
    count = matched(book, "b", [KEYS[:4]], 0, 17)
    book.load("b", [[4, 5, 6, 7, 8]], count)
    assert (count, book.host_tokens("b", count)) == (16, 8)
    assert book.host_tokens("unknown", 4) == 0


def test_a_hit_takes_all_full_pages_and_the_last_window():
    book = hybrid(KEYS[:4], KEYS[1:3])
    assert book.match("r", [KEYS[:4], KEYS[:4]], computed=0, length=17) == 12  # page 3 of the window is missing
    book.load("r", [[11, 12, 13, 14], [0, 22, 23, 24]], 12)
    assert book.take().loads["r"] == [
        (0, KEYS[0], 11), (0, KEYS[1], 12), (0, KEYS[2], 13), (1, KEYS[1], 22), (1, KEYS[2], 23),
    ]  # fmt: skip


def test_no_hit_reaches_over_a_hole_in_either_group():
    assert hybrid(KEYS[:1], KEYS).match("r", [KEYS[:4], KEYS[:4]], 0, 17) == 4
    assert hybrid(KEYS, []).match("r", [KEYS[:4], KEYS[:4]], 0, 17) == 0
    assert hybrid(KEYS, [KEYS[0]]).match("r", [KEYS[:4], KEYS[:4]], 0, 17) == 4
    assert hybrid(KEYS, KEYS[2:4]).match("r", [KEYS[:4], KEYS[:4]], 0, 17) == 16  # tokens 11 .. 15 are in pages 2, 3


def test_pages_that_left_the_window_are_neither_saved_nor_loaded():
    book = hybrid()
    book.match("r", [KEYS[:4], KEYS[:4]], 0, 17)
    book.schedule("r", [[1, 2, 3, 4, 5], [0, 0, 7, 8, 9]], True, computed=17)
    assert [key for place, key, _ in book.take().saves if place == 1] == KEYS[2:4]


def test_another_window_than_vllm_keeps_is_an_error_and_no_wrong_token():
    for blocks in ([31, 22, 23, 24], [0, 0, 23, 24]):  # one page more, one page less
        book = hybrid(KEYS[:4], KEYS[1:3])
        book.match("r", [KEYS[:4], KEYS[:4]], 0, 17)
        with pytest.raises(RuntimeError, match="other pages of cache group 1 than its window of 5 tokens"):
            book.load("r", [[11, 12, 13, 14], blocks], 12)
