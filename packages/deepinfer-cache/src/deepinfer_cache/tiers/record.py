"""A page on disk: a fixed header, then the page's bytes.

offset  bytes  meaning
     0      4  magic "DIKV"
     4      2  version of this layout, little endian
     6      1  checksum: 1 = blake2b-128, 2 = xxh3-128
     7      1  zero
     8     16  fingerprint of model, weights and page layout
    24     16  key of the page (a digest of the whole prefix)
    40      8  payload bytes, little endian
    48     16  checksum of bytes 0 .. 47 and the payload
    64         payload
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

MAGIC, VERSION = b"DIKV", 1
HEADER_BYTES = 64
_PREFIX = struct.Struct("<4sHBx16s16sQ")
BLAKE2B, XXH3 = 1, 2


class RecordError(ValueError):
    """The bytes are not the record that was asked for; the message says why."""


def fingerprint(**facts: str | int | bytes) -> bytes:
    """16 bytes that are equal only when all facts are.

    Args:
        facts: whatever decides what the bytes of a page mean, e.g. `model="...", weights=digest, dtype="bfloat16",
            page_size=16, layout="kv-v1"`. The order does not matter.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"deepinfer-kv")
    for name in sorted(facts):
        value = facts[name]
        data = value if isinstance(value, bytes) else repr(value).encode()
        for part in (name.encode(), type(value).__name__.encode(), data):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def pack(mark: bytes, key: bytes, payload: Any) -> bytes:
    """The header of a record.

    Args:
        mark: the fingerprint, 16 bytes.
        key: the page's key, 16 bytes.
        payload: anything with a buffer.
    """
    method = XXH3 if XXH3 in _CHECKSUMS else BLAKE2B
    prefix = _PREFIX.pack(MAGIC, VERSION, method, mark, key, memoryview(payload).nbytes)
    return prefix + _CHECKSUMS[method](prefix, payload)


def unpack(data: bytes, mark: bytes, key: bytes, payload_bytes: int) -> memoryview:
    """The payload of a record.

    Raises:
        RecordError: a flipped bit, a cut or longer file, another model, another key, another version.
    """
    if len(data) < HEADER_BYTES:
        raise RecordError(f"{len(data)} bytes are too few for a header")
    magic, version, method, found_mark, found_key, length = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise RecordError("it is not a page of this cache")
    if version != VERSION:
        raise RecordError(f"its layout is version {version}, this is version {VERSION}")
    if found_mark != mark:
        raise RecordError("it was written for another model, other weights or another layout")
    if found_key != key:
        raise RecordError("it holds another prefix than its name says")
    if length != payload_bytes or len(data) != HEADER_BYTES + length:
        raise RecordError(f"it has {len(data) - HEADER_BYTES} of {payload_bytes} bytes")
    if method not in _CHECKSUMS:
        raise RecordError(f"its checksum method {method} is not available here")
    payload = memoryview(data)[HEADER_BYTES:]
    if _CHECKSUMS[method](data[: _PREFIX.size], payload) != data[_PREFIX.size : HEADER_BYTES]:
        raise RecordError("its checksum is wrong")
    return payload


def _blake2b(prefix: bytes, payload: Any) -> bytes:
    digest = hashlib.blake2b(prefix, digest_size=16)
    digest.update(payload)
    return digest.digest()


_CHECKSUMS: dict[int, Callable[[bytes, Any], bytes]] = {BLAKE2B: _blake2b}

try:
    import xxhash
except ImportError:  # pip install xxhash: checksums ten times as fast
    pass
else:

    def _xxh3(prefix: bytes, payload: Any) -> bytes:
        digest = xxhash.xxh3_128(prefix)
        digest.update(payload)
        return digest.digest()

    _CHECKSUMS[XXH3] = _xxh3
