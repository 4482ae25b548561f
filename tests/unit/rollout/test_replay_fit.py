"""A replay row with images larger than the recipe allows trains on smaller ones, with points scaled to match."""

import io
from collections.abc import Callable

import pytest
from PIL import Image

from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.replay import ReplayRow
from osworld_pipeline.recipes.schema import AgentSection
from osworld_pipeline.rollout.trajectories import replay_trajectories


@pytest.mark.parametrize(("max_pixels", "size", "point"), [(8192, (128, 64), "[100,50]"), (2048, (64, 32), "[50,25]")])
def test_points_are_scaled_with_the_image_that_is_trained_on(
    processor,
    noise_png: Callable[[int, int, int], bytes],
    max_pixels: int,
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
    agent = AgentSection(max_pixels=max_pixels, system_prompt="short")
    (trajectory,) = replay_trajectories(row, lambda _: image, Renderer(processor), agent=agent)
    assert Image.open(io.BytesIO(trajectory.images[0])).size == size
    assert point in processor.tokenizer.decode(trajectory.token_ids).replace(" ", "")


def test_in_window_mode_each_answer_of_a_row_is_a_sequence_with_the_weight_of_the_row(
    processor, noise_png: Callable[[int, int, int], bytes]
) -> None:
    image = noise_png(64, 32, 0)
    words = load_dialect("slime").format("Wait", {"action": "wait"})
    row = ReplayRow(
        row_id="abc",
        task_id="t",
        original_task_id="t",
        source_dataset="theirs",
        reward=1.0,
        messages=(system_message("s"), *(user_message("u"), assistant_message(words)) * 2),
        image_sha256s=(digest_bytes(image),) * 2,
    )
    agent = AgentSection(context_mode="window", window_screenshots=1, system_prompt="short")
    parts = replay_trajectories(row, lambda _: image, Renderer(processor), agent=agent, advantage=2.0, weight=0.5)
    assert [part.trajectory_id for part in parts] == ["replay:abc#0", "replay:abc#1"]
    assert [(part.weight, part.advantage, len(part.images)) for part in parts] == [(0.5, 2.0, 1)] * 2
