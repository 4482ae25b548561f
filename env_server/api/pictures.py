"""Small pictures of the replicas' screens. An episode's is the one that its client saw last, so that its desktop is not
asked for another; only a desktop whose episode has none yet is."""

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
"""How often a desktop without an episode's picture may be asked for one."""
ASK_TIMEOUT_S = 3.0
"""A desktop that takes longer is busy, and soon has another picture to show; the page asks again."""
JPEG_QUALITY = 75
MAX_CACHED = 512


def picture_version(replica: Replica, episode: Episode | None) -> str | None:
    """Another text when there is another picture to fetch; None while there is none."""
    if replica.desktop is None:
        return None
    if episode is not None and episode.last_seen is not None:
        return f"{episode.episode_id}-{episode.num_steps}-{episode.last_used_at:.3f}"
    if replica.state == "warm":
        return f"warm-{replica.num_starts}-{replica.num_served}"
    return f"{replica.state}-{replica.num_served}-{int(time.monotonic()) // ASK_INTERVAL_S}"


class Pictures:
    """Made small one at a time, so that a crowd of onlookers takes one thread and no more."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], tuple[str, bytes]] = {}
        self._reducing = asyncio.Lock()
        self._looking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(self, replica: Replica, episode: Episode | None, width: int) -> bytes | None:
        """JPEG, at most `width` wide; None where there is no screen to see just now."""
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
        # It is being reset, or it has no guest agent; whether it is dead is its watcher's business.
        return None


def _reduce(original: bytes, width: int) -> bytes | None:
    buffer = io.BytesIO()
    try:
        with open_picture(original) as image:
            height = max(1, round(image.height * width / image.width))
            # A JPEG is read at a fraction of its size, which is most of the work saved.
            image.draft("RGB", (width, height))
            small = image.convert("RGB")
            small.thumbnail((width, height), Image.Resampling.BILINEAR)
            small.save(buffer, "JPEG", quality=JPEG_QUALITY)
    except (UnidentifiedImageError, OSError):
        return None
    return buffer.getvalue()
