"""The raw and the shaped reward have different names, and each part of the shaped reward has its own name."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import Outcome, StepSignals
from osworld_pipeline.domain.task import Task
from osworld_pipeline.recipes.schema import RewardSection
from osworld_pipeline.rollout.reward import shape_reward
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeSettings, EpisodeTools, run_episode

DOCS = Path(__file__).resolve().parents[3] / "docs"
TYPE = load_dialect("slime").format("Type", {"action": "type", "text": "a"})
DONE = load_dialect("slime").format("Finish", {"action": "terminate", "status": "success"})


def test_parts_of_a_reward_have_the_names_that_the_docs_use() -> None:
    steps = [StepSignals(action_type="type", action_parsed=True, action_executed=True)] * 2
    parts = set(shape_reward(0.0, steps, max_steps=8, section=RewardSection(), has_a11y_tree=True).parts)
    penalties = {name for name in parts if name.startswith("penalty_")}
    assert penalties == set(re.findall(r"`(penalty_\w+)`", (DOCS / "defects.md").read_text()))
    # A weight is a key of the recipe, and every key is on the recipes' page.
    assert parts - penalties <= set(RewardSection.model_fields)
    page = (DOCS / "recipes.md").read_text()
    assert [name for name in sorted(parts - penalties) if f"| `{name}` |" not in page] == []


async def test_a_shaped_reward_does_not_make_an_episode_a_success(
    task: Task,
    plan: EpisodePlan,
    settings: EpisodeSettings,
    make_tools: Callable[..., EpisodeTools],
    fake_desktop: Any,
) -> None:
    generous = replace(settings, reward=settings.reward.model_copy(update={"alpha": 10.0}))
    episode = await run_episode(
        task, plan, tools=make_tools([fake_desktop(reward=0.0)], [TYPE, DONE]), settings=generous
    )
    assert episode.reward is not None
    assert (episode.reward.task, episode.reward.shaped) == (0.0, 1.0)
    assert episode.outcome is Outcome.FAILURE
