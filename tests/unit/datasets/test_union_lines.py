"""Blocks of lines: every line once and in order, from plain and compressed files of any shape."""

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from osworld_pipeline.datasets.lines import find_file, lines_of, other_files, read_blocks


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def lines_in(path: Path, *, block_bytes: int = 64, max_line_bytes: int = 10_000) -> list[bytes]:
    """The lines, with `too_long` or `unreadable` in the place of such a fault."""
    found: list[bytes] = []
    for block in read_blocks(path, block_bytes=block_bytes, max_line_bytes=max_line_bytes):
        found += [block.fault.encode()] if block.fault else [line for _, line in lines_of(block.read())]
    return found


LINE = st.binary(max_size=200).map(lambda line: line.replace(b"\n", b"").replace(b"\xef\xbb\xbf", b""))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LINE, max_size=12), st.booleans(), st.integers(1, 300))
def test_every_line_comes_once_and_in_order(
    tmp_path: Path, lines: list[bytes], has_last_end: bool, block_bytes: int
) -> None:
    data = b"\n".join(lines) + (b"\n" if has_last_end and lines else b"")
    expected = [line for _, line in lines_of(data)]
    for name, content in {"a": data, "a.gz": gzip.compress(data, 1), "a.zst": zstd(data)}.items():
        (tmp_path / name).write_bytes(content)
        assert lines_in(tmp_path / name, block_bytes=block_bytes) == expected, name


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 120), min_size=1, max_size=10), st.integers(1, 90), st.booleans())
def test_only_lines_over_the_limit_are_skipped(
    tmp_path: Path, sizes: list[int], block_bytes: int, is_compressed: bool
) -> None:
    path = tmp_path / ("a.gz" if is_compressed else "a")
    data = b"".join(b"x" * size + b"\n" for size in sizes)
    path.write_bytes(gzip.compress(data, 1) if is_compressed else data)
    # The reader of a block's lines checks them against the limit once more.
    found = [
        b"too_long" if len(line) > 50 else line for line in lines_in(path, block_bytes=block_bytes, max_line_bytes=50)
    ]
    assert found == [b"too_long" if size > 50 else b"x" * size for size in sizes]


def test_several_gzip_members_or_zstd_frames_are_read_as_one_file(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"1\n2") + gzip.compress(b"3\n") + b"\0" * 10)
    (tmp_path / "a.zst").write_bytes(zstd(b"1\n2") + zstd(b"3\n"))
    assert lines_in(tmp_path / "a.gz") == lines_in(tmp_path / "a.zst") == [b"1", b"23"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_the_readable_lines_of_a_cut_file_stay_and_the_rest_is_one_fault(tmp_path: Path, suffix: str) -> None:
    data = b"".join(os.urandom(500).hex().encode() + b"\n" for _ in range(2_000))
    packed = gzip.compress(data) if suffix == ".gz" else zstd(data)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(packed[: len(packed) * 3 // 4])
    *lines, last = lines_in(path, block_bytes=10_000)
    assert last == b"unreadable"
    assert 1_000 < len(lines) < 2_000
    assert lines == data.split(b"\n")[: len(lines)]


def test_damage_in_the_middle_is_a_fault_and_not_a_crash(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(os.urandom(200_000).hex().encode()))
    packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "a.gz").write_bytes(packed)
    (tmp_path / "b.zst").write_bytes(b"no zstd at all")
    assert lines_in(tmp_path / "a.gz")[-1] == b"unreadable"
    assert lines_in(tmp_path / "b.zst") == [b"unreadable"]


def test_a_plain_file_is_read_before_its_compressed_forms(tmp_path: Path) -> None:
    assert find_file(tmp_path / "a.jsonl") is None
    for name in ("a.jsonl.zst", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
    assert find_file(tmp_path / "a.jsonl") == tmp_path / "a.jsonl.gz"
    assert other_files(tmp_path / "a.jsonl") == [tmp_path / "a.jsonl.zst"]


@pytest.mark.slow
def test_a_line_of_two_gigabytes_is_skipped_in_little_memory(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "a"
    with path.open("wb") as file:
        file.write(b"first\n")
        file.seek(2 * 2**30, os.SEEK_CUR)
        file.write(b"\nlast\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert lines_in(path, block_bytes=2**20, max_line_bytes=2**22) == [b"first", b"too_long", b"last"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
