from __future__ import annotations

import gzip
import io
import tracemalloc

import pytest
import zstandard
from deepinfer_offline.job import lines
from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.lines import read_lines
from hypothesis import given
from hypothesis import strategies as st


def read(path):
    return [(line.number, line.raw) for line in read_lines(path)]


def test_only_the_newline_byte_ends_a_line(tmp_path):
    file = tmp_path / "in.jsonl"
    text = '{"a": "one\u2028two\u2029three\u0085four\x0bfive\x0csix"}'
    file.write_bytes(text.encode() + b"\n" + text.encode())
    assert read(file) == [(1, text.encode()), (2, text.encode())]


def test_byte_order_mark_and_carriage_returns_are_dropped_and_blank_lines_skipped(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\r\n   \t\n\ntwo")
    assert read(file) == [(1, b"one"), (5, b"two")]


def test_an_empty_file_has_no_lines(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"")
    assert read(file) == []


@pytest.mark.parametrize("bom", [b"\xff\xfe", b"\xfe\xff"])
def test_utf16_is_refused_with_a_way_out(tmp_path, bom):
    file = tmp_path / "in.jsonl"
    file.write_bytes(bom + b"{\x00}\x00")
    with pytest.raises(JobError, match=r"UTF-16.*iconv"):
        read(file)


@given(st.lists(st.binary(max_size=40).filter(lambda raw: b"\n" not in raw), max_size=20))
def test_lines_are_what_stands_between_newlines(tmp_path_factory, pieces):
    file = tmp_path_factory.mktemp("lines") / "in.jsonl"
    file.write_bytes(b"x\n" + b"\n".join(pieces))
    expected = [(1, b"x")]
    for number, piece in enumerate(pieces, start=2):
        piece = piece.removesuffix(b"\r")
        if piece.strip(b" \t\r\v\f"):
            expected.append((number, piece))
    assert read(file) == expected


def test_lines_longer_than_the_chunks_they_are_read_in(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_CHUNK", 7)
    file = tmp_path / "in.jsonl"
    wanted = [b"a" * length for length in range(1, 40)]
    file.write_bytes(b"\n".join(wanted) + b"\n")
    assert [raw for _, raw in read(file)] == wanted


@pytest.mark.parametrize("last", [b"\n", b""])
def test_a_line_over_the_limit_is_a_fault_of_its_own(tmp_path, monkeypatch, last):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"before\n" + b"x" * (8 << 20) + b"\nafter\n" + b"y" * ((1 << 20) + 1) + last)
    tracemalloc.start()
    found = list(read_lines(file))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(line.number, line.raw) for line in found] == [(1, b"before"), (2, b""), (3, b"after"), (4, b"")]
    assert found[1].fault == found[3].fault == "the line is longer than 1 MiB"
    assert peak < 8 << 20, "the long line was held in memory"


def test_gzip_and_zstd_are_told_by_their_first_bytes(tmp_path):
    plain = b"".join(b'{"n": %d}\n' % n for n in range(50_000))
    expected = plain.splitlines()
    packed = {
        "a.gz": gzip.compress(plain),
        "two-members": gzip.compress(plain[:100_000]) + gzip.compress(plain[100_000:]),
        "a.zst": zstandard.compress(plain),
        "two-frames.jsonl": zstandard.compress(plain[:100_000]) + zstandard.compress(plain[100_000:]),
        "streamed": streamed_zstd(plain),
    }
    for name, data in packed.items():
        (tmp_path / name).write_bytes(data)
        assert [raw for _, raw in read(tmp_path / name)] == expected, name


def streamed_zstd(plain):
    out = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as writer:
        writer.write(plain)
    return out.getvalue()


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_compressed_file_that_was_cut_off_is_refused(tmp_path, pack, keep):
    plain = "".join(f'{{"n": {n}, "k": {n * 7919 % 10007}}}\n' for n in range(20_000)).encode()
    data = pack(plain)
    file = tmp_path / "in.gz"
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(JobError, match=r"cannot read .* after line"):
        read(file)


def test_a_damaged_compressed_file_is_refused(tmp_path):
    data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(b"hello\n" * 1000 + bytes(range(256))))
    data[len(data) // 2] ^= 0xFF
    file = tmp_path / "in.zst"
    file.write_bytes(bytes(data))
    with pytest.raises(JobError, match="cannot read"):
        read(file)
