from __future__ import annotations

import os

import pytest
from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.journal import Journal
from deepinfer_offline.job.lock import open_locked
from hypothesis import given
from hypothesis import strategies as st

RECORDS = 5


@pytest.fixture
def open_journal(tmp_path):
    fds = []

    def open_it(name="out.journal"):
        fds.append(os.open(tmp_path / name, os.O_RDWR | os.O_CREAT))
        return Journal(tmp_path / name, fds[-1])

    yield open_it
    for fd in fds:
        os.close(fd)


def fill(journal, count=RECORDS):
    journal.start({"created": 1}, RECORDS)
    for record in reversed(range(count)):
        journal.append(record, 200 + record, b'{"answer": "%d \xe2\x80\xa8"}' % record)
    return journal


def read_back(journal):
    header = journal.read_header()
    if not header:
        return None
    journal.recover(RECORDS)
    return {r: (int(journal.status[r]), journal.result(r)) for r in range(RECORDS) if journal.answered()[r]}


def test_answers_come_back_by_record(open_journal):
    fill(open_journal())
    again = open_journal()
    assert again.read_header() == {"deepinfer_journal": 1, "created": 1}
    assert again.recover(RECORDS) == RECORDS
    assert [again.result(r) for r in range(RECORDS)] == [b'{"answer": "%d \xe2\x80\xa8"}' % r for r in range(RECORDS)]
    assert again.status.tolist() == [200, 201, 202, 203, 204]


def test_a_file_that_is_cut_at_any_byte_keeps_every_whole_answer_and_takes_more(open_journal, tmp_path):
    fill(open_journal())
    data = (tmp_path / "out.journal").read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in range(len(data) + 1):
        (tmp_path / "cut").write_bytes(data[:cut])
        journal = open_journal("cut")
        found = read_back(journal)
        whole = sum(end <= cut for end in ends)
        if not whole:
            assert found is None, "a torn header is a new journal"
            continue
        assert sorted(found) == list(range(RECORDS - whole + 1, RECORDS))
        assert journal.damaged == 0
        journal.append(0, 200, b"{}")
        assert read_back(open_journal("cut"))[0] == (200, b"{}")


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_one_wrong_byte_loses_one_answer_at_most_and_invents_none(tmp_path_factory, position, flip):
    path = tmp_path_factory.mktemp("journal") / "j"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fill(Journal(path, fd))
    good = read_back(Journal(path, fd))
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= flip
    path.write_bytes(bytes(data))
    try:
        found = read_back(Journal(path, fd))
    except JobError:
        found = {}  # the header is hit: refused as a whole
    finally:
        os.close(fd)
    if found:
        assert len(found) >= RECORDS - 2, "a newline that vanishes takes two answers with it"
        assert found.items() <= good.items()


def test_the_later_of_two_answers_counts(open_journal):
    journal = fill(open_journal())
    journal.append(2, 200, b"new")
    assert read_back(open_journal())[2] == (200, b"new")


def test_answers_can_be_forgotten_by_status(open_journal):
    journal = fill(open_journal())
    assert journal.forget(lambda status: status != 200) == 4
    assert journal.answered().tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("content", [b"my notes", b"0" * 9, b'{"a": 1}\n', b"00000000 {}\n", b"\x00" * 4096])
def test_other_files_are_refused(open_journal, tmp_path, content):
    (tmp_path / "out.journal").write_bytes(content)
    with pytest.raises(JobError, match=r"not a journal.*--fresh"):
        open_journal().read_header()


def test_records_outside_the_job_are_damage(open_journal):
    journal = fill(open_journal())
    journal.allocate(99)
    journal.append(50, 200, b"{}")
    again = open_journal()
    again.read_header()
    again.recover(RECORDS)
    assert again.damaged == 1


def test_flushes_are_batched(open_journal, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    clock = [100.0]
    monkeypatch.setattr("deepinfer_offline.job.journal.time.monotonic", lambda: clock[0])
    journal = open_journal()
    journal.start({}, 1000)
    synced.clear()
    for record in range(1000):
        journal.append(record, 200, b"{}")
        journal.tick()
    assert not synced
    clock[0] += 1.0
    journal.tick()
    journal.tick()
    assert len(synced) == 1, "once a second while there is something new"


def test_a_full_disk_is_one_sentence(open_journal, monkeypatch):
    journal = fill(open_journal(), count=1)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(JobError, match=r"cannot write .*: No space left on device"):
        journal.append(1, 200, b"{}")


def test_the_lock_is_exclusive_and_goes_with_its_descriptor(tmp_path):
    path = tmp_path / "out.journal"
    fd = open_locked(path, tmp_path / "out")
    with pytest.raises(JobError, match=r"another run is writing .*out"):
        open_locked(path, tmp_path / "out")
    os.close(fd)
    os.close(open_locked(path, tmp_path / "out"))


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_not_taken(tmp_path, monkeypatch):
    import fcntl

    path = tmp_path / "out.journal"
    real, calls = fcntl.flock, []

    def flock(fd, operation):
        if not calls:
            path.unlink()  # the run before us finishes between our open and our lock
        calls.append(fd)
        return real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    fd = open_locked(path, tmp_path / "out")
    assert len(calls) == 2
    assert os.fstat(fd).st_ino == path.stat().st_ino
    os.close(fd)
