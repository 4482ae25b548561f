"""Groups: deterministic names and seeds, never more desktops at once than there are, faults apart from valid ones."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from osworld_pipeline.agent.dialects import SlimeDialect
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EnvServerError, NoCapacityError, RecipeError
from osworld_pipeline.rollout.run_episode import EpisodeSettings, EpisodeTools
from osworld_pipeline.rollout.run_group import GroupPlan, plan_episode, require_desktops, run_groups

Tools = Callable[..., EpisodeTools]
DONE = SlimeDialect().format("Finish", {"action": "terminate", "status": "success"})


@pytest.fixture
def group_plan(sampling: SamplingParams) -> GroupPlan:
    return GroupPlan(stage_key="gspo", update=2, group_size=3, checkpoint_id="c", sampling=sampling)


def test_ids_and_seeds_depend_on_the_plan_alone(group_plan: GroupPlan) -> None:
    first = plan_episode(group_plan, 1, 2)
    assert (first.episode_id, first.group_id) == ("gspo-u0002-g01-s02", "gspo-u0002-g01")
    assert plan_episode(group_plan, 1, 2) == first
    seeds = {plan_episode(group_plan, group, sample).seed for group in range(4) for sample in range(3)}
    assert len(seeds) == 12
    reseeded = replace(group_plan, sampling=replace(group_plan.sampling, seed=8))
    assert plan_episode(reseeded, 1, 2).seed != first.seed


async def test_a_group_holds_its_episodes_in_order_and_leaves_faults_out_of_the_valid_ones(
    task: Task, group_plan: GroupPlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktops = [fake_desktop(faults={"reset": NoCapacityError("busy")}), *[fake_desktop() for _ in range(5)]]
    heard: list[str] = []
    groups = await run_groups(
        [task, task],
        group_plan,
        tools=make_tools(desktops, [DONE]),
        settings=settings,
        on_episode=lambda episode: heard.append(episode.episode_id),
    )
    ids = [episode.episode_id for group in groups for episode in group.episodes]
    assert ids == [f"gspo-u0002-g{group:02d}-s{sample:02d}" for group in range(2) for sample in range(3)]
    assert sorted(heard) == ids
    assert [len(group.valid_episodes) for group in groups] == [2, 3]
    require_desktops(groups[0].episodes)


async def test_no_more_episodes_run_at_once_than_there_are_replicas(
    task: Task, group_plan: GroupPlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    open_now: list[int] = []
    most_open = 0

    class CountedDesktop(fake_desktop):
        async def reset(self, task: Task) -> Any:
            nonlocal most_open
            open_now.append(1)
            most_open = max(most_open, len(open_now))
            await asyncio.sleep(0.01)
            return await super().reset(task)

        async def close(self) -> None:
            open_now.pop()

    tools = make_tools([CountedDesktop() for _ in range(6)], [DONE])
    await run_groups([task, task], group_plan, tools=tools, settings=settings)
    assert most_open == settings.desktop.num_replicas == 2


async def test_an_error_that_ends_the_run_is_raised_as_itself_and_every_desktop_is_given_back(
    task: Task, group_plan: GroupPlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktops = [fake_desktop() for _ in range(3)]
    tight = replace(settings, agent=settings.agent.model_copy(update={"max_context_tokens": 100}))
    with pytest.raises(RecipeError):
        await run_groups([task], group_plan, tools=make_tools(desktops, [DONE]), settings=tight)
    assert all(desktop.is_closed for desktop in desktops[:2])


async def test_a_run_without_a_single_desktop_says_so(
    task: Task, group_plan: GroupPlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktops = [fake_desktop(faults={"reset": EnvServerError("no env server answers at x")}) for _ in range(3)]
    (group,) = await run_groups([task], group_plan, tools=make_tools(desktops, [DONE]), settings=settings)
    with pytest.raises(EnvServerError, match="all 3 episodes ended in an env_fault; the first: no env server answers"):
        require_desktops(group.episodes)
