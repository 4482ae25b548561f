"""Resources of episodes are opened once for all of them, and an episode leaves only its record."""

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from group_runs import run_groups

from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import Outcome, SamplingParams
from osworld_pipeline.domain.task import Task
from osworld_pipeline.rollout.run_episode import EpisodeSettings, EpisodeTools
from osworld_pipeline.rollout.run_group import GroupPlan

DONE = load_dialect("slime").format("Finish", {"action": "terminate", "status": "success"})
NUM_EPISODES = 96


async def test_many_episodes_leave_no_threads_and_no_second_processor(
    task: Task,
    sampling: SamplingParams,
    settings: EpisodeSettings,
    make_tools: Callable[..., EpisodeTools],
    fake_desktop: Any,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_folder, folder)
    renderer = Renderer(load_processor(folder))
    shutil.rmtree(folder)  # a second load fails
    tools = replace(make_tools([fake_desktop() for _ in range(NUM_EPISODES)], [DONE]), renderer=renderer)
    plan = GroupPlan(stage_key="s", update=0, group_size=4, checkpoint_id="c", sampling=sampling)
    before = threading.active_count()
    groups = await run_groups([task] * (NUM_EPISODES // 4), plan, tools=tools, settings=settings)
    outcomes = [episode.outcome for group in groups for episode in group.episodes]
    assert outcomes == [Outcome.SUCCESS] * NUM_EPISODES
    # All of them share the loop's own threads, of which there are a few more than cores.
    assert threading.active_count() - before < NUM_EPISODES / 2
