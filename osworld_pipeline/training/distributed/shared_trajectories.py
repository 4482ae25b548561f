"""Sends rank 0's trajectories to every rank. Screenshots in the state folder are sent as hashes, and each rank reads
those of its own passes. Other images (a demonstration's resized ones), and all images if a rank cannot read the folder,
are sent as bytes, each distinct image once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from osworld_pipeline.domain.trajectory import LazyImages, Trajectory, with_held_images
from osworld_pipeline.errors import StoreError
from osworld_pipeline.training.distributed.process_group import ProcessGroup

ReadImage = Callable[[str], bytes]
"""A stored image by its SHA-256. Raises StoreError."""


@dataclass(frozen=True, kw_only=True)
class _Sent:
    trajectories: tuple[Trajectory, ...]
    """The trajectories without the images that are sent as hashes."""
    hashes: tuple[tuple[str, ...] | None, ...]
    """Hashes of each trajectory; None if its images are sent as bytes."""


def share_trajectories(
    trajectories: Sequence[Trajectory], process_group: ProcessGroup, read_image: ReadImage | None
) -> tuple[Trajectory, ...]:
    """`trajectories` are rank 0's; `read_image` reads from the state folder on this rank, None if it cannot. Every rank
    must call this."""
    if process_group.is_alone:
        return tuple(trajectories)
    by_hash = read_image is not None
    sent: _Sent = process_group.broadcast(_pack(trajectories, by_hash=by_hash) if process_group.is_main else None)
    if any(hashes for hashes in sent.hashes) and not all(process_group.gather(_is_visible(sent, read_image))):
        sent = process_group.broadcast(_pack(trajectories, by_hash=False) if process_group.is_main else None)
    return tuple(
        item if hashes is None or read_image is None else replace(item, images=LazyImages(read_image, hashes))
        for item, hashes in zip(sent.trajectories, sent.hashes, strict=True)
    )


def _pack(trajectories: Sequence[Trajectory], *, by_hash: bool) -> _Sent:
    hashes = [item.images.sha256s if by_hash and isinstance(item.images, LazyImages) else None for item in trajectories]
    left = [item if keys is None else replace(item, images=()) for item, keys in zip(trajectories, hashes, strict=True)]
    return _Sent(trajectories=with_held_images(left), hashes=tuple(hashes))


def _is_visible(sent: _Sent, read_image: ReadImage | None) -> bool:
    """Checks only the newest image: it is the last to appear in a folder on a network file system."""
    newest = next(hashes[-1] for hashes in reversed(sent.hashes) if hashes)
    if read_image is None:
        return False
    try:
        read_image(newest)
    except (StoreError, OSError):
        return False
    return True
