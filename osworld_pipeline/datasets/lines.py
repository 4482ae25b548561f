"""JSONL files in blocks of whole lines, plain or compressed (gzip, zstd): several processes share the blocks, or one
reads them line by line. A line over the limit is skipped without being held in memory."""

import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

BLOCK_BYTES = 4 * 2**20
MAX_LINE_BYTES = 128 * 2**20
SUFFIXES = ("", ".gz", ".zst")
"""A source may be compressed: data.jsonl, else data.jsonl.gz, else data.jsonl.zst."""
_SCAN_BYTES = 2**20
_PIECE_BYTES = 2**16
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Block:
    """Whole lines of a file, or the fault found in their place."""

    path: Path
    offset: int = 0
    num_bytes: int = 0
    """Length of the lines, uncompressed."""
    num_file_bytes: int = 0
    """Bytes read of the file on disk, for progress."""
    data: bytes | None = None
    """The lines of a compressed file; None for a plain one, whose lines `read` loads."""
    fault: Literal["", "too_long", "unreadable"] = ""
    """`too_long`: one line, skipped. `unreadable`: the rest of the file; `reason` says why."""
    reason: str = ""

    def read(self) -> bytes:
        """The lines. Raises OSError."""
        if self.data is not None:
            data = self.data
        else:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                data = file.read(self.num_bytes) or b""
        return data[len(_BOM) :] if self.offset == 0 and data.startswith(_BOM) else data


def find_file(path: Path) -> Path | None:
    """`path`, or its compressed form; None if neither exists."""
    return next(iter(_forms(path)), None)


def other_files(path: Path) -> list[Path]:
    """Further forms of the same source, other than the one that is read."""
    return _forms(path)[1:]


def _forms(path: Path) -> list[Path]:
    try:
        return [found for suffix in SUFFIXES if (found := path.with_name(path.name + suffix)).is_file()]
    except OSError:
        # No permission to list its folder: treat it as present and unreadable.
        return [path]


def size_of(path: Path) -> int:
    """Size in bytes; 0 if stat fails."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def too_long(max_line_bytes: int) -> str:
    return f"a line longer than {max_line_bytes / 2**20:g} MiB: split it, or raise the limit"


def lines_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line without its end) of every line, including blank ones. A long block of one line is not
    copied, and keeps its line end."""
    number, start = 0, 0
    while start < len(data):
        number += 1
        end = data.find(b"\n", start)
        if end < 0:
            end = len(data)
        # A slice of the whole is the same object; JSON treats a line end as white space.
        is_whole = not start and end >= len(data) - 1 and len(data) >= _SCAN_BYTES
        yield number, data if is_whole else data[start:end]
        start = end + 1


def read_blocks(path: Path, *, block_bytes: int = BLOCK_BYTES, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Block]:
    """The blocks of the file in order. Never raises for the content of the file: a fault is a Block with `fault` set,
    and an unreadable one is the last."""
    try:
        if path.suffix in (".gz", ".zst"):
            yield from _compressed_blocks(path, block_bytes, max_line_bytes)
        else:
            yield from _plain_blocks(path, block_bytes, max_line_bytes)
    except OSError as error:
        yield Block(path=path, fault="unreadable", reason=f"cannot be read: {error.strerror or error}")


def _plain_blocks(path: Path, block_bytes: int, max_line_bytes: int) -> Iterator[Block]:
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, io.SEEK_END)
        start = 0
        while start < size:
            target = min(start + block_bytes, size)
            end = size if target == size else _line_end(file, target - 1, size, limit=target + max_line_bytes)
            if end is not None and end - start <= max(block_bytes, max_line_bytes):
                yield Block(path=path, offset=start, num_bytes=end - start, num_file_bytes=end - start)
                start = end
                continue
            # The last line that begins in this block is long: the lines before it form a block of their own.
            last = _line_start(file, start, target)
            if last > start:
                yield Block(path=path, offset=start, num_bytes=last - start, num_file_bytes=last - start)
            end = _line_end(file, last, size, limit=size) or size
            fault = "too_long" if end - last > max_line_bytes + 1 else ""
            yield Block(path=path, offset=last, num_bytes=end - last, num_file_bytes=end - last, fault=fault)
            start = end


def _line_end(file: io.FileIO, start: int, size: int, *, limit: int) -> int | None:
    """The end (after the newline) of the line that contains `start`; None if it is beyond `limit`."""
    while start < size:
        if start > limit:
            return None
        file.seek(start)
        piece = file.read(_SCAN_BYTES) or b""
        if not piece:
            return size
        found = piece.find(b"\n")
        if found >= 0:
            return start + found + 1
        start += len(piece)
    return size


def _line_start(file: io.FileIO, start: int, target: int) -> int:
    """The start of the line that contains `target`, at least `start`."""
    while target > start:
        begin = max(start, target - _SCAN_BYTES)
        file.seek(begin)
        found = (file.read(target - begin) or b"").rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        target = begin
    return start


def _compressed_blocks(path: Path, block_bytes: int, max_line_bytes: int) -> Iterator[Block]:
    held, offset, is_skipping, fault = bytearray(), 0, False, ""
    place = reported = 0  # in the file on disk

    def block(data: bytes, progress: int) -> Block:
        return Block(path=path, offset=offset, num_bytes=len(data), num_file_bytes=progress, data=data)

    with path.open("rb") as raw:
        pieces = _unpacked(raw, path.suffix)
        while not fault:
            try:
                piece, place = next(pieces, (b"", place))
            except (OSError, EOFError, ValueError, zlib.error) as error:
                piece, fault = b"", f"the compressed data is damaged or cut: {error}"
            if is_skipping and (b"\n" in piece or not piece):
                yield Block(path=path, offset=offset, fault="too_long")
                offset, is_skipping, piece = offset + 1, False, piece.partition(b"\n")[2]
            elif is_skipping:
                continue
            held += piece
            if piece and len(held) < block_bytes:
                continue
            # The last line of a complete file may lack its newline; in a truncated file it is an incomplete line.
            end = held.rfind(b"\n") + 1 if piece or fault else len(held)
            if end:
                found = block(bytes(memoryview(held)[:end]), place - reported)
                offset, reported = offset + end, place
                del held[:end]
                yield found
                del found
            elif len(held) > max_line_bytes:
                held, is_skipping = bytearray(), True
            if not piece:
                break
    if fault:
        yield Block(path=path, offset=offset, fault="unreadable", reason=fault)


def _unpacked(raw: BinaryIO, suffix: str) -> Iterator[tuple[bytes, int]]:
    """Small pieces and the position in the file, so that little is lost before a damaged place. The file may have
    several members or frames."""
    if suffix == ".zst":
        import pyarrow as pa  # slow to import, used only here

        stream = pa.CompressedInputStream(raw, "zstd")
        while piece := stream.read(_PIECE_BYTES):
            yield piece, raw.tell()
        return
    unpacker = zlib.decompressobj(wbits=31)
    while packed := raw.read(_PIECE_BYTES):
        while packed:
            if unpacker.eof:
                if packed := packed.lstrip(b"\0"):  # padding between members
                    unpacker = zlib.decompressobj(wbits=31)
                continue
            if piece := unpacker.decompress(packed, _SCAN_BYTES):
                yield piece, raw.tell()
            packed = unpacker.unconsumed_tail or unpacker.unused_data
    while not unpacker.eof and (tail := unpacker.decompress(b"", _SCAN_BYTES)):
        yield tail, raw.tell()
    if not unpacker.eof:
        raise EOFError("the file ends before its compressed data is complete")
