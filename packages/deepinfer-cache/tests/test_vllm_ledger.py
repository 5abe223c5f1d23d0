from deepinfer_cache.adapters.vllm.ledger import Ledger

KEYS = [bytes([i]) * 16 for i in range(6)]


def ledger(on_disk=(), host_pages=100):
    return Ledger(4, set(on_disk).__contains__, host_pages)


def test_leading_kept_pages_are_found_and_one_token_is_left_to_compute():
    assert ledger(KEYS[:3]).match("r", KEYS[:4], computed=0, length=16) == 12
    assert ledger(KEYS[:4]).match("r", KEYS[:4], computed=0, length=16) == 12
    assert ledger(KEYS[:4]).match("r", KEYS[:4], computed=0, length=17) == 16
    assert ledger([KEYS[0], KEYS[2]]).match("r", KEYS[:4], computed=0, length=16) == 4
    assert ledger(KEYS[:4]).match("r", KEYS[:4], computed=8, length=17) == 8
    assert ledger(KEYS[:4]).match("r", KEYS[:4], computed=7, length=17) == 0


def test_loads_name_the_blocks_behind_the_local_hit():
    book = ledger(KEYS[:4])
    count = book.match("r", KEYS[:4], computed=4, length=17)
    book.load("r", [70, 71, 72, 73, 74], count)
    assert book.take().loads == list(zip(KEYS[1:4], [71, 72, 73], strict=True))
    assert book.take().loads == []


def test_each_page_is_saved_once_when_a_step_completes_it():
    book = ledger()
    book.match("r", KEYS[:3], 0, 14)
    book.schedule("r", [5, 6], True, computed=6)
    assert book.take().saves == [(KEYS[0], 5)]
    book.schedule("r", [7, 8], False, computed=14)
    assert book.take().saves == [(KEYS[1], 6), (KEYS[2], 7)]
    book.schedule("r", [], False, computed=15)
    assert book.take().saves == []


def test_a_page_of_two_requests_is_saved_by_the_first():
    book = ledger()
    for name, block in (("a", 3), ("b", 9)):
        book.match(name, KEYS[:1], 0, 8)
        book.schedule(name, [block, block + 1], True, computed=8)
    assert book.take().saves == [(KEYS[0], 3)]


def test_host_pages_are_mirrored_up_to_their_number():
    book = Ledger(4, None, host_pages=1)
    book.match("r", KEYS[:2], 0, 9)
    book.schedule("r", [1, 2], True, computed=8)
    assert len(book.take().saves) == 2
    assert book.match("s", KEYS[:2], 0, 9) == 0  # the first page was pushed out by the second
    assert book.match("s", KEYS[1:2], 0, 5) == 4


def test_a_resumed_request_starts_with_its_new_blocks():
    book = ledger()
    book.match("r", KEYS[:2], 0, 9)
    book.schedule("r", [1], True, computed=4)
    book.take()
    book.schedule("r", [8, 9], True, computed=8)
    assert book.take().saves == [(KEYS[1], 9)]
