"""A replay row with images larger than the recipe allows trains on smaller ones, and on points that moved with them."""

import io
from collections.abc import Callable

import pytest
from PIL import Image

from osworld_pipeline.agent.dialects import load_dialect
from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.replay import ReplayRow
from osworld_pipeline.rollout.trajectories import replay_trajectory


@pytest.mark.parametrize(("max_pixels", "size", "point"), [(None, (128, 64), "[100,50]"), (2048, (64, 32), "[50,25]")])
def test_points_move_with_the_image_that_trains(
    processor,
    noise_png: Callable[[int, int, int], bytes],
    max_pixels: int | None,
    size: tuple[int, int],
    point: str,
) -> None:
    image = noise_png(128, 64, 0)
    words = load_dialect("slime").format("Click", {"action": "left_click", "coordinate": [100, 50]})
    row = ReplayRow(
        row_id="abc",
        task_id="t",
        original_task_id="t",
        source_dataset="theirs",
        reward=1.0,
        messages=(system_message("s"), user_message("u"), assistant_message(words)),
        image_sha256s=(digest_bytes(image),),
    )
    trajectory = replay_trajectory(row, lambda _: image, Renderer(processor), max_pixels=max_pixels)
    assert Image.open(io.BytesIO(trajectory.images[0])).size == size
    assert point in processor.tokenizer.decode(trajectory.token_ids).replace(" ", "")
