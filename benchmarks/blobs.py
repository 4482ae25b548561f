"""Storage of images: folder trees (256 folders, 256x256) against pack files with an index, at up to a million images:
writing, reading at random, looking up missing ones, listing, overhead and backup."""

import ctypes
import hashlib
import os
import random
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from benchmarks.spread import Spread, print_table

BATCH, NUM_READS, NUM_SYNCED, NUM_BACKED_UP, PACK_BYTES = 1000, 5000, 2000, 20_000, 256 << 20
Named = tuple[str, bytes]


def make_images(start: int, count: int) -> list[Named]:
    """Bytes that do not compress, 2 to 8 kB, and their SHA-256."""
    images = []
    for index in range(start, start + count):
        rng = random.Random(index)
        data = rng.randbytes(rng.randint(2000, 8000))
        images.append((hashlib.sha256(data).hexdigest(), data))
    return images


class Layout(Protocol):
    name: str

    def write_synced(self, image: Named) -> None: ...

    def write_batch(self, images: Sequence[Named]) -> None:
        """Durable when it returns."""
        ...

    def read(self, sha256: str) -> bytes | None: ...

    def list(self) -> Iterator[str]: ...

    def backup(self, names: Sequence[str]) -> Sequence[str]:
        """Files to copy, below the root, for these images (or more)."""
        ...


class Tree:
    """One file for each image, `depth` levels of 256 folders."""

    def __init__(self, root: Path, *, depth: int) -> None:
        self.root, self.depth = root, depth
        self.name = f"tree of {'x'.join(['256'] * depth)} folders"
        root.mkdir(parents=True)
        self.folder = os.open(root, os.O_RDONLY)

    def path(self, sha256: str) -> Path:
        return self.root.joinpath(*(sha256[2 * level : 2 * level + 2] for level in range(self.depth)), sha256)

    def write_synced(self, image: Named) -> None:
        path = self._put(image, is_synced=True)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def write_batch(self, images: Sequence[Named]) -> None:
        for image in images:
            self._put(image, is_synced=False)
        sync_file_system(self.folder)

    def _put(self, image: Named, *, is_synced: bool) -> Path:
        path = self.path(image[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = self.root / f".{image[0]}.tmp"
        with temp.open("wb") as handle:
            handle.write(image[1])
            if is_synced:
                handle.flush()
                os.fsync(handle.fileno())
        os.rename(temp, path)
        return path

    def read(self, sha256: str) -> bytes | None:
        try:
            return self.path(sha256).read_bytes()
        except FileNotFoundError:
            return None

    def list(self) -> Iterator[str]:
        for _, _, names in os.walk(self.root):
            yield from names

    def backup(self, names: Sequence[str]) -> Sequence[str]:
        return [str(self.path(name).relative_to(self.root)) for name in names]


class Packs:
    """Images one after the other in large files, with an SQLite index."""

    name = "packs with an SQLite index"

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        self.index = sqlite3.connect(root / "index.sqlite")
        self.index.execute("PRAGMA journal_mode = WAL")
        self.index.execute("PRAGMA synchronous = FULL")
        self.index.execute("CREATE TABLE blobs (sha BLOB PRIMARY KEY, pack INT, start INT, size INT) WITHOUT ROWID")
        self.number, self.handles = 0, {}
        self.pack = (root / "0.pack").open("ab")

    def write_synced(self, image: Named) -> None:
        self.write_batch([image])

    def write_batch(self, images: Sequence[Named]) -> None:
        rows = []
        for sha256, data in images:
            rows.append((bytes.fromhex(sha256), self.number, self.pack.tell(), len(data)))
            self.pack.write(data)
        self.pack.flush()
        os.fsync(self.pack.fileno())
        with self.index:
            self.index.executemany("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?)", rows)
        if self.pack.tell() > PACK_BYTES:
            self.pack.close()
            self.number += 1
            self.pack = (self.root / f"{self.number}.pack").open("ab")

    def read(self, sha256: str) -> bytes | None:
        query = "SELECT pack, start, size FROM blobs WHERE sha = ?"
        row = self.index.execute(query, (bytes.fromhex(sha256),)).fetchone()
        if row is None:
            return None
        if row[0] not in self.handles:
            self.handles[row[0]] = os.open(self.root / f"{row[0]}.pack", os.O_RDONLY)
        return os.pread(self.handles[row[0]], row[2], row[1])

    def list(self) -> Iterator[str]:
        for (sha,) in self.index.execute("SELECT sha FROM blobs"):
            yield sha.hex()

    def backup(self, names: Sequence[str]) -> Sequence[str]:
        return [path.name for path in self.root.iterdir()]


def sync_file_system(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
        raise OSError(ctypes.get_errno(), "syncfs")


def run_blobs(console: Console, *, rounds: int, folder: Path, num_blobs: int = 1_000_000) -> list[dict[str, Any]]:
    """`rounds` is how often each read is measured; the images are written once a layout."""
    makers: tuple[Callable[[Path], Layout], ...] = (
        lambda root: Tree(root, depth=1),
        lambda root: Tree(root, depth=2),
        Packs,
    )
    results: list[dict[str, Any]] = []
    os.sync()
    for make in makers:
        root = folder / "blobs"
        try:
            results += measure(make(root), root, num_blobs, rounds)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    names = list(dict.fromkeys(row["layout"] for row in results))
    figures = list(dict.fromkeys((row["figure"], row["unit"]) for row in results))
    table = []
    for figure, unit in figures:
        found = {row["layout"]: row for row in results if row["figure"] == figure}
        table.append((f"{figure}, {unit}", *(f"{found[name]['p50']:,.4g}" if name in found else "-" for name in names)))
    title = f"{num_blobs:,} images of 2 to 8 kB; medians; limited by the disk and by inodes"
    print_table(console, title, ("figure", *names), table)
    return results


def measure(layout: Layout, root: Path, num_images: int, rounds: int) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []

    def add(figure: str, unit: str, values: Iterable[float]) -> None:
        spread = Spread.of(values)
        results.append({"bench": "blobs", "layout": layout.name, "figure": figure, "unit": unit, **spread.fields()})

    before = usage(root)
    names, num_bytes, batch_s, total_s = [], 0, [], 0.0
    for start in range(0, num_images, BATCH):
        images = make_images(start, min(BATCH, num_images - start))
        began = time.perf_counter()
        layout.write_batch(images)
        batch_s.append(time.perf_counter() - began)
        total_s += batch_s[-1]
        names += [sha256 for sha256, _ in images]
        num_bytes += sum(len(data) for _, data in images)
    add(f"write, synced once a batch of {BATCH}", "images/s", [num_images / total_s])
    add(f"the slowest batch of {BATCH}", "s", [max(batch_s)])
    extra = make_images(num_images, NUM_SYNCED)
    add("write, each synced, one writer", "images/s", [timed_rate(layout.write_synced, extra)])
    if isinstance(layout, Tree):
        extra = make_images(num_images + NUM_SYNCED, NUM_SYNCED)
        with ThreadPoolExecutor(16) as pool:
            began = time.perf_counter()
            list(pool.map(layout.write_synced, extra))
        add("write, each synced, 16 threads", "images/s", [len(extra) / (time.perf_counter() - began)])
    for kind in ("cold", "warm"):
        if kind == "cold" and not drop_caches():
            continue
        chosen = random.Random(1).sample(names, min(NUM_READS, len(names)))
        if kind == "warm":
            for name in chosen:
                layout.read(name)
        times = [read_ms(layout, name) for _ in range(rounds if kind == "warm" else 1) for name in chosen]
        add(f"read at random, {kind}, p50", "ms", [Spread.of(times).median])
        add(f"read at random, {kind}, p95", "ms", [Spread.of(times).quantile(0.95)])
    absent = [hashlib.sha256(str(index).encode()).hexdigest() for index in range(NUM_READS)]
    add("look for one that is not there", "ms", [read_ms(layout, name) for name in absent])
    drop_caches()
    began = time.perf_counter()
    assert sum(1 for _ in layout.list()) >= len(names)
    add("list all, cold where that is allowed", "s", [time.perf_counter() - began])
    blocks, inodes = (after - was for after, was in zip(usage(root), before, strict=True))
    add("disk beyond the images' own bytes", "%", [100 * (blocks / num_bytes - 1)])
    add("inodes", "", [float(inodes)])
    drop_caches()
    chosen = layout.backup(names[:NUM_BACKED_UP])
    listing = root.with_name("backup.txt")
    listing.write_text("\n".join(chosen))
    began = time.perf_counter()
    with subprocess.Popen(["tar", "-cf", "-", "-C", str(root), "-T", str(listing)], stdout=subprocess.PIPE) as tar:
        copied = tar.stdout
        assert copied is not None
        size = sum(map(len, iter(lambda: copied.read(1 << 20), b"")))
    listing.unlink()
    add("backup with tar, cold where that is allowed", "MB/s", [size / 1e6 / (time.perf_counter() - began)])
    return results


def timed_rate(write: Callable[[Named], None], images: Sequence[Named]) -> float:
    began = time.perf_counter()
    for image in images:
        write(image)
    return len(images) / (time.perf_counter() - began)


def read_ms(layout: Layout, name: str) -> float:
    began = time.perf_counter()
    layout.read(name)
    return (time.perf_counter() - began) * 1e3


def usage(root: Path) -> tuple[int, int]:
    """Used bytes and inodes of the file system (other programs may use it at the same time)."""
    found = os.statvfs(root)
    return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree


def drop_caches() -> bool:
    """Empty the page cache if permitted; returns whether it was."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True
