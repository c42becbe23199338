"""Small addresses of published payloads."""

from __future__ import annotations

import base64
import binascii
import struct

import msgspec

from spillover.errors import InputError

__all__ = ["Ref", "pack_name"]

_PACKED = struct.Struct("<QQQQQII")
_ALL = 0xFFFFFFFF
_LINKED = 1
_SERIAL_BITS = 24
_LARGEST = (1 << 63) - 1


class Ref(msgspec.Struct, frozen=True, gc=False):
    """Where one publication lies, or one of its records. An address, never a right: see `Owners`.

    Relative to the pool, so that it survives processes, machines, renaming or copying the pool, and
    compaction.

    Attributes:
        pool: first eight bytes of the pool's id, as a little-endian integer.
        pack: id of the pack file: the writer's id, then its serial number (24 bits).
        offset: where the extent begins in the pack, in bytes.
        length: length of the extent, in bytes.
        check: first eight bytes of the extent's index checksum, as a little-endian integer.
        ordinal: which record of the extent; None for all of them.
        linked: whether the extent depends on others.
    """

    pool: int
    pack: int
    offset: int
    length: int
    check: int
    ordinal: int | None = None
    linked: bool = False

    def at(self, ordinal: int) -> Ref:
        """The reference to record number ``ordinal`` of the same publication."""
        return Ref(self.pool, self.pack, self.offset, self.length, self.check, ordinal, self.linked)

    def whole(self) -> Ref:
        """The reference to the whole publication that this record belongs to."""
        return Ref(self.pool, self.pack, self.offset, self.length, self.check, None, self.linked)

    def pack_bytes(self) -> bytes:
        """The reference as 48 bytes."""
        ordinal = _ALL if self.ordinal is None else self.ordinal
        flags = _LINKED if self.linked else 0
        return _PACKED.pack(self.pool, self.pack, self.offset, self.length, self.check, ordinal, flags)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Ref:
        """Inverse of `pack_bytes`.

        Raises:
            InputError: these are not 48 bytes of a reference.
        """
        try:
            pool, pack, offset, length, check, ordinal, flags = _PACKED.unpack(data)
        except struct.error:
            raise InputError(f"a reference has {_PACKED.size} bytes, not {len(data)}") from None
        if flags & ~_LINKED:
            raise InputError(f"a reference with unknown flags {flags:#x}")
        if offset + length > _LARGEST:
            raise InputError(f"a reference to bytes {offset} to {offset + length}, which no file has")
        return cls(pool, pack, offset, length, check, None if ordinal == _ALL else ordinal, bool(flags))

    def __str__(self) -> str:
        """64 letters, digits, ``-`` and ``_``."""
        return base64.urlsafe_b64encode(self.pack_bytes()).decode()

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Inverse of ``str``.

        Raises:
            InputError: not the text of a reference.
        """
        try:
            data = base64.b64decode(text, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            data = b""
        if len(data) != _PACKED.size:
            raise InputError(f"{text[:80]!r} is not a reference", hint="spill pool ls POOL prints references")
        return cls.from_bytes(data)


def pack_id(writer: int, serial: int) -> int:
    """The id of a writer's pack."""
    return writer << _SERIAL_BITS | serial


def writer_of(pack: int) -> int:
    """The id of the writer that made a pack."""
    return pack >> _SERIAL_BITS


def pack_name(pack: int) -> str:
    """The name of a pack's file: writer id and serial number in hexadecimal."""
    return f"{writer_of(pack):010x}-{pack & (1 << _SERIAL_BITS) - 1:06x}"
