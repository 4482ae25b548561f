"""Finds unreferenced data: images that no row names, and files of parts that no reader can reach. Also the reverse:
rows whose image is missing."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.errors import StoreError
from osworld_pipeline.progress import OnProgress, tracked
from osworld_pipeline.store.blobs import BlobStore
from osworld_pipeline.store.holdings import need_other_copies
from osworld_pipeline.store.image_sets import absent, gather, gather_keys, keys_of
from osworld_pipeline.store.pack_index import image_keys
from osworld_pipeline.store.part_files import COMPACTED, DETAILS_OF, SEED, Manifest, PartFile, list_names, take_snapshot
from osworld_pipeline.store.reading import compute

LISTED = 8_192
"""Image names in memory at once."""
IMAGE_COLUMNS = ("screenshot_sha256", "images")
"""All columns with hashes of images, of all tables."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files that can be removed."""

    paths: tuple[Path, ...]
    num_bytes: int


def named_images(folders: Iterable[Path], on_progress: OnProgress | None = None) -> Iterator[tuple[Path, list[str]]]:
    """SHA-256 of the images that Parquet files below `folders` name, one row group at a time. Hidden files, which are
    still being written, are skipped.

    Raises:
        StoreError: a file cannot be read, so its references are unknown.
    """
    for folder in folders:
        paths = sorted(folder.rglob("*.parquet"))
        for path in tracked(paths, on_progress, f"reading the rows of {folder.name}", "files"):
            # Images of a file that is being written are within the grace period.
            if not any(name.startswith(".") for name in path.relative_to(folder).parts):
                yield from ((path, names) for names in images_of(path))


def used_images(folders: Sequence[Path], on_progress: OnProgress | None = None) -> np.ndarray:
    """The keys (image_sets.py) of all images that rows name. Raises StoreError."""
    return gather(names for _, names in named_images(folders, on_progress))


def unused_images(
    blobs: BlobStore, used: np.ndarray, *, before: float, on_progress: OnProgress | None = None
) -> Iterator[Files]:
    """Files of images that are not among `used` and that were not stored or touched since `before` (Unix time), some
    thousands at a time.

    The rows are read before the images are listed. An image of a row that was added meanwhile was touched within the
    grace period, so it is not older than `before`, which is one grace period ago. Raises StoreError.
    """
    listed = blobs.list(on_progress, "looking for unused images")
    old = ((sha256, path, state.st_size) for sha256, path, state in listed if state.st_mtime < before)
    while batch := list(islice(old, LISTED)):
        unused = [batch[place] for place in absent([sha256 for sha256, _, _ in batch], used)]
        yield Files(paths=tuple(path for _, path, _ in unused), num_bytes=sum(size for _, _, size in unused))


def missing_images(
    blobs: BlobStore, folders: Sequence[Path], on_progress: OnProgress | None = None
) -> Mapping[str, Path]:
    """SHA-256 of each image that a row names and the store lacks, and a file that names it. Raises StoreError."""
    there = gather_keys(_keys_there(blobs, on_progress))
    found: dict[str, Path] = {}
    for path, names in named_images(folders, on_progress):
        for place in absent(names, there):
            # An image may have been stored since the listing, before the row that names it.
            if names[place] not in found and not _is_there(blobs, names[place]):
                found[names[place]] = path
    return dict(sorted(found.items()))


def _keys_there(blobs: BlobStore, on_progress: OnProgress | None) -> Iterator[np.ndarray]:
    """The keys of all images in the store. Lists single files first: images that are packed meanwhile are then in an
    index."""
    listed = (sha256 for sha256, _, _ in blobs.list(on_progress))
    yield from (keys_of(names) for names in iter(lambda: list(islice(listed, LISTED)), []))
    here = blobs.packs.here()
    blobs.packs.check()
    for index in tracked(blobs.packs.indexes(), on_progress, "reading the indexes of packs", "indexes"):
        is_here = np.array([name in here for name in index.packs], bool)
        yield from (image_keys(records[is_here[records["pack"]]]) for records in index.chunks())


def _is_there(blobs: BlobStore, sha256: str) -> bool:
    try:
        return blobs.size(sha256) >= 0
    except StoreError:
        return False


def stale_part_files(root: Path, *, retired_grace_s: float, grace_s: float) -> Files:
    """Versions of parts that were replaced more than `retired_grace_s` ago, and files that killed writers and
    compactions left more than `grace_s` ago.

    Raises:
        StoreError: the manifest is damaged, lost or old, or a file to remove has the only copy of a part.
    """
    manifest = Manifest.checked(root)
    paths: list[Path] = []
    for head, details in DETAILS_OF.items():
        files = take_snapshot(root, head)
        newest = {file.part: root / head / file.name for file in files.small}
        old = [root / head / file.name for file in files.superseded if _is_older(newest[file.part], retired_grace_s)]
        named = {*files.compacted, *(Path(name).name for name in manifest.retired), SEED}
        heads = set(list_names(root / head)) - {path.name for path in old}
        for table in (head, *details):
            folder = root / table / COMPACTED
            left = [folder / name for name in list_names(folder) if name not in named]
            if table in details:
                left += [root / table / name for name in list_names(root / table) if not _has_head(name, heads)]
            if table == head:
                need_other_copies(root, head, manifest, [path.name for path in left if _is_older(path, grace_s)])
            # Remove heads before their details: a head without details would count as damage.
            paths += [*old, *(path for path in left if _is_older(path, grace_s))]
            old = []
    sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
    return Files(paths=tuple(paths), num_bytes=sum(sizes))


def remove_part_files(paths: Collection[Path], on_progress: OnProgress | None = None) -> None:
    """Raises StoreError if the file system refuses."""
    for path in tracked(paths, on_progress, "removing replaced parts", "files"):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot remove {path}: {error.strerror}; make its folder writable for this user"
            ) from error


def _has_head(name: str, heads: set[str]) -> bool:
    """Whether a head may still refer to this file of details; also True for a file that is not a part."""
    return name == SEED or name in heads or PartFile.parse(name) is None


def _is_older(path: Path, age_s: float) -> bool:
    try:
        return path.stat().st_mtime < time.time() - age_s
    except FileNotFoundError:
        return False


def images_of(path: Path) -> Iterator[list[str]]:
    """The images that a file of parts refers to, in batches; none if it was removed. Raises StoreError."""
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in IMAGE_COLUMNS if name in file.schema_arrow.names]
            for number in range(file.num_row_groups if columns else 0):
                for column in file.read_row_group(number, columns=columns).columns:
                    flat = compute.list_flatten(column) if pa.types.is_list(column.type) else column
                    yield [sha256 for sha256 in flat.unique().to_pylist() if sha256]
    except FileNotFoundError:
        return  # removed meanwhile by its owner, so it has no references
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged ({error}), so its references are unknown: restore or remove it") from error
