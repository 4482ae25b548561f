"""An unchanged screen is an observation like any other: the training data has it where the model saw it."""

from collections.abc import Callable
from typing import Any

from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.task import Task
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeSettings, EpisodeTools, run_episode
from osworld_pipeline.rollout.trajectories import episode_trajectories

TYPE = load_dialect("slime").format("Type", {"action": "type", "text": "a"})


async def test_a_screenshot_that_did_not_change_stays_in_the_training_data(
    task: Task,
    plan: EpisodePlan,
    settings: EpisodeSettings,
    make_tools: Callable[..., EpisodeTools],
    fake_desktop: Any,
) -> None:
    class Frozen(fake_desktop):
        """Always shows the first screen."""

        async def act(self, command: str, *, pause_s: float, note: str = "") -> Any:
            return self._observe()

    tools = make_tools([Frozen(reward=0.0)], [TYPE])
    episode = await run_episode(task, plan, tools=tools, settings=settings)
    assert (episode.outcome, len(episode.steps)) == (Outcome.TRUNCATED, 3)
    assert not any(step.signals.screen_changed for step in episode.steps)
    blobs = tools.sink.blobs  # type: ignore[attr-defined]
    assert len(blobs) == 1, "stored once"
    (sequence,) = episode.sequences
    assert sequence.image_steps == (0, 1, 2)
    (trajectory,) = episode_trajectories(episode, blobs.__getitem__)
    assert len(trajectory.images) == 3
    assert tuple(trajectory.images) == tools.engine.requests[-1].images  # type: ignore[attr-defined]
