"""The bytes inside a .zst file of any number of frames. The package's own reader ends quietly where a file was cut
short, which would lose documents without a word."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO

from cuboid.errors import UserError

BLOCK = 1 << 17


class ZstdStream(io.RawIOBase):
    def __init__(self, raw: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{path} needs a package that is not installed; pip install zstandard") from None
        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._packed or self._raw.read(BLOCK)
            if not block:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready, self._packed = memoryview(self._frame.decompress(block)), b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
