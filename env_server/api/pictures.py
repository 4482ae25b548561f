"""Thumbnails of the replicas' screens. An episode's thumbnail is the screen that its client saw last. A screenshot
is requested only from a desktop that has no observation yet."""

import asyncio
import io
import time
from collections import defaultdict

from PIL import Image, UnidentifiedImageError

from env_server.episodes.episode import Episode
from env_server.replicas.replica import Replica
from osworld_pipeline.domain.pictures import open_picture
from osworld_pipeline.errors import ReplicaError

ASK_INTERVAL_S = 3
"""Least interval between two screenshots of a desktop without an observation."""
ASK_TIMEOUT_S = 3.0
"""A desktop that takes longer is busy and has another screen soon; the page asks again."""
JPEG_QUALITY = 75
MAX_CACHED = 512


def picture_version(replica: Replica, episode: Episode | None) -> str | None:
    """A text that changes when the picture changes; None while there is no picture."""
    if replica.desktop is None:
        return None
    if episode is not None and episode.last_seen is not None:
        return f"{episode.episode_id}-{episode.num_steps}-{episode.last_used_at:.3f}"
    if replica.state == "warm":
        return f"warm-{replica.num_starts}-{replica.num_served}"
    return f"{replica.state}-{replica.num_served}-{int(time.monotonic()) // ASK_INTERVAL_S}"


class Pictures:
    """Reduces pictures one at a time, so that many viewers use no more than one thread."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], tuple[str, bytes]] = {}
        self._reducing = asyncio.Lock()
        self._looking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(self, replica: Replica, episode: Episode | None, width: int) -> bytes | None:
        """JPEG, at most `width` wide; None if there is no screen now."""
        async with self._looking[replica.replica_id]:
            version = picture_version(replica, episode)
            if version is None:
                return None
            key = (replica.replica_id, width)
            cached = self._made.get(key)
            if cached is not None and cached[0] == version:
                return cached[1]
            original = await _original(replica, episode)
            if original is None:
                return None
            async with self._reducing:
                made = await asyncio.to_thread(_reduce, original, width)
            if made is not None:
                if len(self._made) >= MAX_CACHED:
                    self._made.clear()
                self._made[key] = (version, made)
            return made


async def _original(replica: Replica, episode: Episode | None) -> bytes | None:
    if episode is not None and episode.last_seen is not None:
        return episode.last_seen.screenshot
    desktop = replica.desktop
    if desktop is None:
        return None
    try:
        return await desktop.guest.screenshot("jpeg", timeout_s=ASK_TIMEOUT_S)
    except ReplicaError:
        # It is being reset, or it has no guest agent; its watcher detects whether it is dead.
        return None


def _reduce(original: bytes, width: int) -> bytes | None:
    buffer = io.BytesIO()
    try:
        with open_picture(original) as image:
            height = max(1, round(image.height * width / image.width))
            # The decoder reads a JPEG at a fraction of its size, which saves most of the work.
            image.draft("RGB", (width, height))
            small = image.convert("RGB")
            small.thumbnail((width, height), Image.Resampling.BILINEAR)
            small.save(buffer, "JPEG", quality=JPEG_QUALITY)
    except (UnidentifiedImageError, OSError):
        return None
    return buffer.getvalue()
