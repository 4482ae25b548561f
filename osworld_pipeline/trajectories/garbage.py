"""What nothing refers to: images that are in no row, and files of parts that no reader can come to. Also the reverse,
rows whose image is not there."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.errors import StoreError
from osworld_pipeline.part_files import COMPACTED, DETAIL_OF, SEED, Manifest, PartFile, list_names, take_snapshot
from osworld_pipeline.trajectories.blobs import BlobStore
from osworld_pipeline.trajectories.holdings import need_other_copies
from osworld_pipeline.trajectories.reading import compute

IMAGE_COLUMNS = ("screenshot_sha256", "images")
"""Every column that holds hashes of images, in whatever table."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files that could go."""

    paths: tuple[Path, ...]
    num_bytes: int


def referenced_images(folders: Iterable[Path]) -> dict[bytes, Path]:
    """SHA-256 of the images that a Parquet file below `folders` names, visible or not, with one such file.

    Raises:
        StoreError: a file cannot be read: what it refers to is unknown.
    """
    found: dict[bytes, Path] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.parquet")):
            if any(name.startswith(".") for name in path.relative_to(folder).parts):
                continue  # being written: its images are newer than the grace
            for digest in _images_of(path):
                found.setdefault(digest, path)
    return found


def unused_images(blobs: BlobStore, folders: Sequence[Path], *, grace_s: float) -> Files:
    """Images older than `grace_s` that no row names. Raises StoreError."""
    before = time.time() - grace_s
    # Listed before the rows are read: an image that is listed as old and then named by a new row was touched for it.
    old = [(sha256, path, state.st_size) for sha256, path, state in blobs.list() if state.st_mtime < before]
    used = referenced_images(folders)
    unused = [(path, size) for sha256, path, size in old if _digest(sha256) not in used]
    return Files(paths=tuple(path for path, _ in unused), num_bytes=sum(size for _, size in unused))


def missing_images(blobs: BlobStore, folders: Sequence[Path]) -> Mapping[str, Path]:
    """SHA-256 of each image that a row names and the store lacks, and a file that names it. Raises StoreError."""
    used = referenced_images(folders)
    for sha256, _, _ in blobs.list():
        used.pop(_digest(sha256), None)
    return {digest.hex() if len(digest) == 32 else digest.decode(): path for digest, path in sorted(used.items())}


def stale_part_files(root: Path, *, retired_grace_s: float, grace_s: float) -> Files:
    """Writings of parts that newer ones replaced longer than `retired_grace_s` ago, and what killed writers and
    compactions left longer than `grace_s` ago.

    Raises:
        StoreError: the manifest is damaged, lost or old, or a file that would go holds the only copy of a part.
    """
    manifest = Manifest.checked(root)
    paths: list[Path] = []
    for head, detail in DETAIL_OF.items():
        files = take_snapshot(root, head)
        newest = {file.part: root / head / file.name for file in files.small}
        old = [root / head / file.name for file in files.superseded if _is_older(newest[file.part], retired_grace_s)]
        named = {*files.compacted, *(Path(name).name for name in manifest.retired), SEED}
        heads = set(list_names(root / head)) - {path.name for path in old}
        for table in filter(None, (head, detail)):
            folder = root / table / COMPACTED
            left = [folder / name for name in list_names(folder) if name not in named]
            if table == detail:
                left += [root / table / name for name in list_names(root / table) if not _has_head(name, heads)]
            if table == head:
                need_other_copies(root, head, manifest, [path.name for path in left if _is_older(path, grace_s)])
            # Heads go before their details: a head without details would be damage.
            paths += [*old, *(path for path in left if _is_older(path, grace_s))]
            old = []
    sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
    return Files(paths=tuple(paths), num_bytes=sum(sizes))


def remove_part_files(paths: Iterable[Path]) -> None:
    """Raises StoreError where the file system refuses."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot remove {path}: {error.strerror}; make its folder writable for this user"
            ) from error


def _has_head(name: str, heads: set[str]) -> bool:
    """Whether a file of details may still be meant by a head, or is no file of details."""
    if name == SEED or name in heads:
        return True
    legacy = re.fullmatch(r"(.+)\.[0-9a-f]{12}\.parquet", name)
    if legacy:
        return f"{legacy[1]}.parquet" in heads
    return PartFile.parse(name) is None


def _is_older(path: Path, age_s: float) -> bool:
    try:
        return path.stat().st_mtime < time.time() - age_s
    except FileNotFoundError:
        return False


def _digest(sha256: str) -> bytes:
    """Half the memory of the text; what is no SHA-256 (a test's, an older program's) stays as it is."""
    try:
        return bytes.fromhex(sha256)
    except ValueError:
        return sha256.encode()


def _images_of(path: Path) -> Iterator[bytes]:
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in IMAGE_COLUMNS if name in file.schema_arrow.names]
            for number in range(file.num_row_groups if columns else 0):
                for column in file.read_row_group(number, columns=columns).columns:
                    flat = compute.list_flatten(column) if pa.types.is_list(column.type) else column
                    yield from (_digest(sha256) for sha256 in flat.unique().to_pylist() if sha256)
    except FileNotFoundError:
        return  # removed meanwhile by its owner, who no longer refers to anything by it
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{path} is damaged ({error}), so what it refers to is unknown: mend or remove it") from error
