"""Host memory and directory: what comes back is what went in, or it is a miss."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from deepinfer_cache import CacheConfig, CacheConfigError, CacheGroup, CacheManager, integrity
from deepinfer_cache.tiers import DiskTier, HostTier, TieredStore, fingerprint
from deepinfer_cache.tiers import record as record_module
from hypothesis import given
from hypothesis import strategies as st

BYTES = 96
MARK = fingerprint(model="tiny", weights=b"\x01\x02", page_size=4)


def key(number):
    return number.to_bytes(16, "big")


def page(number):
    return np.random.default_rng(number).integers(0, 256, BYTES, np.uint8)


def stored_file(tier, number):
    return tier.directory / key(number).hex()[:2] / f"{key(number).hex()}.kv"


@pytest.fixture
def disk(tmp_path):
    return DiskTier(tmp_path / "kv", MARK, BYTES)


def test_a_later_run_finds_what_an_earlier_one_wrote(disk, tmp_path):
    disk.put(key(1), page(1))
    later = DiskTier(tmp_path / "kv", MARK, BYTES)
    assert np.array_equal(later.get(key(1)), page(1))
    assert later.get(key(2)) is None
    assert later.used_bytes == BYTES + record_module.HEADER_BYTES


@pytest.mark.parametrize("fact", [{"model": "other"}, {"weights": b"\x01\x03"}, {"page_size": 8}])
def test_another_model_weights_or_layout_is_a_miss(disk, tmp_path, fact):
    disk.put(key(1), page(1))
    other = DiskTier(
        tmp_path / "kv", fingerprint(**{"model": "tiny", "weights": b"\x01\x02", "page_size": 4} | fact), BYTES
    )
    assert key(1) not in other
    assert other.get(key(1)) is None


@given(st.integers(0, 8 * (BYTES + record_module.HEADER_BYTES) - 1))
def test_any_flipped_bit_is_noticed(bit):
    data = bytearray(record_module.pack(MARK, key(1), page(1)) + page(1).tobytes())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(record_module.RecordError):
        record_module.unpack(bytes(data), MARK, key(1), BYTES)


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1], lambda data: data + b"x", lambda data: b"", lambda data: b"hello" * 40,
    lambda data: data[:70] + bytes([data[70] ^ 1]) + data[71:],
])  # fmt: skip
def test_damaged_files_are_misses_with_a_warning_and_are_written_again(disk, damage, caplog):
    disk.put(key(1), page(1))
    file = stored_file(disk, 1)
    file.write_bytes(damage(file.read_bytes()))
    store = TieredStore(HostTier(BYTES, 10 * BYTES), disk)
    with caplog.at_level(logging.WARNING, "deepinfer_cache"):
        assert store.fetch([key(1)]) == 0
    assert str(file) in caplog.text
    assert store.wants(key(1))
    store.put([key(1)], page(1)[None])
    assert np.array_equal(disk.get(key(1)), page(1))


def test_a_record_under_another_name_is_a_miss(disk):
    disk.put(key(1), page(1))
    other = stored_file(disk, 2)
    other.parent.mkdir(exist_ok=True)
    os.replace(stored_file(disk, 1), other)
    assert disk.get(key(2)) is None


def test_the_size_limit_lets_the_least_recently_used_go(tmp_path):
    each = BYTES + record_module.HEADER_BYTES
    disk = DiskTier(tmp_path, MARK, BYTES, max_bytes=10 * each)
    for number in range(10):
        disk.put(key(number), page(number))
        os.utime(stored_file(disk, number), (number, number))
    disk.get(key(0))  # used just now
    disk.put(key(10), page(10))
    assert disk.used_bytes <= 10 * each
    assert key(0) in disk
    assert key(10) in disk
    assert key(1) not in disk


def test_files_of_other_models_count_for_nothing_and_stay(tmp_path):
    other = DiskTier(tmp_path, fingerprint(model="other"), BYTES)
    other.put(key(1), page(1))
    disk = DiskTier(tmp_path, MARK, BYTES, max_bytes=BYTES)
    disk.put(key(2), page(2))
    assert key(1) in other


WRITER = """
import sys
from pathlib import Path
import numpy as np
from deepinfer_cache.tiers import DiskTier, fingerprint
mark, size, seed = fingerprint(model="tiny", weights=bytes([1, 2]), page_size=4), int(sys.argv[2]), int(sys.argv[3])
disk = DiskTier(Path(sys.argv[1]), mark, size, max_bytes=40 * size)
rng = np.random.default_rng(seed)
for number in rng.integers(0, 60, 300).tolist():
    disk.put(number.to_bytes(16, "big"), np.random.default_rng(number).integers(0, 256, size, np.uint8))
    disk.get(int(rng.integers(0, 60)).to_bytes(16, "big"))
"""


def test_processes_share_a_directory(tmp_path, caplog):
    words = [sys.executable, "-c", WRITER, str(tmp_path), str(BYTES)]
    workers = [subprocess.Popen([*words, str(seed)]) for seed in range(2)]
    deadline = time.monotonic() + 60
    disk = DiskTier(tmp_path, MARK, BYTES)
    with caplog.at_level(logging.WARNING, "deepinfer_cache"):
        while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
            for number in range(60):
                found = disk.get(key(number))
                assert found is None or np.array_equal(found, page(number))
    assert [worker.wait() for worker in workers] == [0, 0]
    assert not caplog.records


def test_an_unwritable_directory_is_said_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheConfigError, match="cannot write"):
        DiskTier(tmp_path / "file" / "kv", MARK, BYTES)


def test_a_failed_write_ends_writing_with_one_warning(disk, caplog, monkeypatch):
    disk.put(key(1), page(1))
    monkeypatch.setattr(type(disk.directory), "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with caplog.at_level(logging.WARNING, "deepinfer_cache"):
        disk.put(key(2), page(2))
        disk.put(key(3), page(3))
    assert len(caplog.records) == 1
    assert np.array_equal(disk.get(key(1)), page(1))
    assert not list(disk.directory.rglob(".*kv-*"))


@given(st.lists(st.tuples(st.sampled_from(["put", "touch"]), st.integers(0, 5)), max_size=30))
def test_host_memory_is_an_lru_cache(actions):
    host, order = HostTier(BYTES, 3 * BYTES), []
    for action, number in actions:
        if action == "put" or key(number) in host:
            host.put(key(number), page(number)) if action == "put" else host.touch(key(number))
            order = [n for n in order if n != number] + [number]
            order = order[-3:]
        assert [number for number in range(6) if key(number) in host] == sorted(order)
    if order:
        assert np.array_equal(host.take([key(n) for n in order]), np.stack([page(n) for n in order]))


def test_host_memory_that_holds_nothing_is_refused():
    with pytest.raises(CacheConfigError, match="holds no page"):
        HostTier(BYTES, BYTES - 1)


# --- through the manager -------------------------------------------------------------------------------------------


class Memory:
    """A device whose pages are rows of an array."""

    def __init__(self, pages):
        self.data = np.zeros((pages + 1, BYTES), np.uint8)
        self.reads = 0

    def read(self, pages):
        self.reads += 1
        return self.data[list(pages)]

    def write(self, pages, records):
        self.data[list(pages)] = records

    def copy(self, sources, targets):
        self.data[list(targets)] = self.data[list(sources)]


def make(directory, pages=6, host_pages=64, **options):
    memory = Memory(pages)
    store = TieredStore(HostTier(BYTES, host_pages * BYTES), DiskTier(directory, MARK, BYTES))
    config = CacheConfig((CacheGroup("kv", "prefix", 4, entry_bytes=BYTES // 4),), pages, 2, 64, **options)
    assert config.page_bytes == BYTES
    return CacheManager(config, memory, store), memory


def compute(cache, memory, tokens, step):
    """Run a sequence alone; its pages hold bytes that depend on the prefix."""
    hashes = cache.hash_tokens(tokens)
    hit = cache.match(hashes, len(tokens), tokens)
    cache.begin(step)
    assert cache.allocate(0, len(tokens), hit)
    cache.commit(0, hashes, len(tokens), tokens)
    for index, digest in enumerate(hashes):
        content = np.frombuffer(digest * (BYTES // 16), np.uint8)
        at = cache.block_table("kv")[0, index]
        if (index + 1) * 4 <= hit.length:
            assert np.array_equal(memory.data[at], content), f"page {index} of the hit holds something else"
        memory.data[at] = content
    cache.free(0)
    cache.complete(step)
    return hit


def test_evicted_pages_come_back_from_host_memory(tmp_path):
    cache, memory = make(tmp_path)
    first, second = list(range(16)), list(range(100, 124))
    assert compute(cache, memory, first, 1).length == 0
    assert cache.save() == 4
    assert memory.reads == 1  # one batch
    compute(cache, memory, second, 2)  # needs all six pages
    hit = compute(cache, memory, [*first, 7], 3)
    assert (hit.length, hit.pages, len(hit.stored)) == (16, (), 4)
    assert cache.stats().loaded_pages == 4
    integrity.check(cache)


def test_a_later_run_hits_what_an_earlier_one_computed(tmp_path):
    cache, memory = make(tmp_path)
    compute(cache, memory, list(range(16)), 1)
    cache.save()
    later, other_memory = make(tmp_path)
    assert compute(later, other_memory, [*range(16), 7], 1).length == 16
    assert later.save() == 0  # nothing new


def test_a_damaged_file_shortens_the_hit_and_never_changes_content(tmp_path):
    cache, memory = make(tmp_path)
    tokens = list(range(16))
    compute(cache, memory, tokens, 1)
    cache.save()
    damaged = cache.hash_tokens(tokens)[2]
    (file,) = tmp_path.rglob(f"{damaged.hex()}.kv")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    later, other_memory = make(tmp_path)
    assert compute(later, other_memory, [*tokens, 7], 1).length == 8


def test_pages_are_saved_only_when_their_step_is_done(tmp_path):
    cache, memory = make(tmp_path)
    tokens = list(range(8))
    cache.begin(1)
    cache.allocate(0, 8, cache.match([], 8))
    cache.commit(0, cache.hash_tokens(tokens), 8)
    assert cache.save() == 0
    cache.complete(1)
    assert cache.save() == 2
    assert memory.reads == 1


def test_a_page_that_parts_in_the_middle_is_copied(tmp_path):
    cache, memory = make(tmp_path, pages=12, partial_hits=True)
    compute(cache, memory, list(range(12)), 1)
    memory_before = memory.data.copy()
    tokens = [*range(10), 50, 51, 52]
    cache.begin(2)
    hit = cache.match(cache.hash_tokens(tokens), len(tokens), tokens)
    assert (hit.length, hit.start, hit.partial[1]) == (10, 10, 2)
    assert cache.allocate(1, len(tokens), hit)
    copied = cache.block_table("kv")[1, 2]
    assert copied not in hit.pages
    assert copied != hit.partial[0]
    assert np.array_equal(memory.data[copied], memory_before[hit.partial[0]])
    integrity.check(cache)


def test_open_pages_of_a_sequence_are_copied_for_its_siblings(tmp_path):
    """n > 1: the first answer's prompt ends inside a page; the second copies that page and computes one token."""
    cache, _ = make(tmp_path, pages=12, partial_hits=True)
    prompt = list(range(11))
    hashes = cache.hash_tokens(prompt)
    cache.begin(1)
    cache.allocate(0, 11, cache.match(hashes, 11, prompt))
    cache.commit(0, hashes, 11, prompt)
    assert cache.match(hashes, 11, prompt).length == 8  # the step that fills the page is not launched yet
    cache.begin(2)
    hit = cache.match(hashes, 11, prompt)
    assert (hit.length, hit.start) == (10, 10)
    assert cache.allocate(1, 11, hit)
    assert cache.block_table("kv")[0, 2] != cache.block_table("kv")[1, 2]
    cache.free(0)
    cache.complete(2)
    assert cache.match(hashes, 11, prompt).length == 8  # the open page went with its owner
    integrity.check(cache)


def test_moving_pages_needs_a_mover():
    with pytest.raises(CacheConfigError, match="mover"):
        CacheManager(CacheConfig((CacheGroup("kv", "prefix", 4),), 6, 2, 64, partial_hits=True))
