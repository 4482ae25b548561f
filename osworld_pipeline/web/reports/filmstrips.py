"""Episodes as the model saw them: small pictures of the screens, with its responses."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from osworld_pipeline.domain.pictures import NO_PICTURE, open_picture
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store import BlobStore
from osworld_pipeline.tables.catalog import fresh_views
from osworld_pipeline.tables.views import NAMED_TASKS

THUMBNAIL_WIDTH = 300
MAX_FRAMES = 12
_INSTRUCTION = f"""
SELECT t.instruction FROM episodes e
JOIN ({NAMED_TASKS}) t ON t.task_id = e.task_id AND (t.is_only OR t.domain = e.domain) WHERE e.episode_id = ?
"""  # noqa: S608 - our own words


@dataclass(frozen=True, kw_only=True)
class FilmstripOf:
    """The episode to show."""

    episode_id: str
    task_id: str
    stage: str
    outcome: str


@dataclass(frozen=True, kw_only=True)
class Frame:
    step_index: int
    image: str
    """A data URI; empty if the screenshot is missing."""
    response: str


@dataclass(frozen=True, kw_only=True)
class Filmstrip:
    episode_id: str
    task_id: str
    instruction: str
    stage: str
    outcome: str
    num_steps: int
    frames: tuple[Frame, ...]


def read_filmstrips(state: StateDir, chosen: Sequence[FilmstripOf]) -> list[Filmstrip]:
    """The filmstrips in the order of `chosen`. Raises TableError."""
    if not chosen:
        return []
    blobs = BlobStore(state.blobs)
    strips = []
    with fresh_views(state, "episodes", "steps", "tasks") as connection:
        for one in chosen:
            steps = connection.execute(
                "SELECT step_index, screenshot_sha256, response_text FROM steps WHERE episode_id = ? ORDER BY 1",
                [one.episode_id],
            ).fetchall()
            task = connection.execute(_INSTRUCTION, [one.episode_id]).fetchone()
            frames = tuple(
                Frame(step_index=index, image=_image(blobs, sha256), response=response or "")
                for index, sha256, response in steps[:MAX_FRAMES]
            )
            strips.append(
                Filmstrip(
                    episode_id=one.episode_id,
                    task_id=one.task_id,
                    instruction=(task[0] or "") if task else "",
                    stage=one.stage,
                    outcome=one.outcome,
                    num_steps=len(steps),
                    frames=frames,
                )
            )
    return strips


def thumbnail(data: bytes) -> str:
    """A small JPEG as a data URI; empty if `data` is not an image."""
    try:
        with open_picture(data) as image:
            small = image.convert("RGB")
    except NO_PICTURE:
        return ""
    height = max(1, round(small.height * THUMBNAIL_WIDTH / small.width))
    if small.width > THUMBNAIL_WIDTH:
        small = small.resize((THUMBNAIL_WIDTH, height), Image.Resampling.LANCZOS, reducing_gap=2.0)
    sink = io.BytesIO()
    small.save(sink, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(sink.getvalue()).decode()


def _image(blobs: BlobStore, sha256: str) -> str:
    try:
        return thumbnail(blobs.read(sha256))
    except StoreError:
        return ""
