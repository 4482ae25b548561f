"""Groups: deterministic names and seeds, never more episodes at once than desktops, faults separate from valid ones."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from group_runs import run_groups
from group_samples import make_ended

from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import Episode, Outcome, SamplingParams
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EngineError, EnvServerError, NoCapacityError, RecipeError
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeSettings, EpisodeTools, RunEpisode
from osworld_pipeline.rollout.run_group import (
    GroupPlan,
    in_turn,
    plan_episode,
    require_services,
    run_group,
)

Tools = Callable[..., EpisodeTools]
DONE = load_dialect("slime").format("Finish", {"action": "terminate", "status": "success"})


@pytest.fixture
def group_plan(sampling: SamplingParams) -> GroupPlan:
    return GroupPlan(stage_key="gspo", update=2, group_size=3, checkpoint_id="c", sampling=sampling)


def test_ids_and_seeds_depend_only_on_the_plan_and_the_groups_name(group_plan: GroupPlan) -> None:
    first = plan_episode(group_plan, "gspo-u0002-g01", 2)
    assert (first.episode_id, first.group_id) == ("gspo-u0002-g01-s02", "gspo-u0002-g01")
    assert plan_episode(group_plan, "gspo-u0002-g01", 2) == first
    again = plan_episode(group_plan, "gspo-u0002-g01", 2, resample=1)
    assert (again.episode_id, again.group_id) == ("gspo-u0002-g01-s02-r1", "gspo-u0002-g01")
    seeds = {plan_episode(group_plan, f"g{group}", sample).seed for group in range(4) for sample in range(3)}
    assert len({*seeds, again.seed}) == 13
    reseeded = replace(group_plan, sampling=replace(group_plan.sampling, seed=8))
    assert plan_episode(reseeded, "gspo-u0002-g01", 2).seed != first.seed


async def test_a_group_holds_its_episodes_in_order_and_leaves_faults_out_of_the_valid_ones(
    task: Task, group_plan: GroupPlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktops = [fake_desktop(faults={"reset": NoCapacityError("busy")}), *[fake_desktop() for _ in range(5)]]
    received: list[str] = []
    groups = await run_groups(
        [task, task],
        group_plan,
        tools=make_tools(desktops, [DONE]),
        settings=settings,
        on_episode=lambda episode: received.append(episode.episode_id),
    )
    ids = [episode.episode_id for group in groups for episode in group.episodes]
    assert ids == [f"gspo-u0002-g{group:02d}-s{sample:02d}" for group in range(2) for sample in range(3)]
    assert sorted(received) == ids
    assert [len(group.valid_episodes) for group in groups] == [2, 3]
    require_services(groups[0].episodes)


async def test_no_more_episodes_run_at_once_than_there_are_replicas(
    task: Task, group_plan: GroupPlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    open_now: list[int] = []
    most_open = 0

    class CountedDesktop(fake_desktop):
        async def reset(self, task: Task, *, record_id: str = "") -> Any:
            nonlocal most_open
            open_now.append(1)
            most_open = max(most_open, len(open_now))
            await asyncio.sleep(0.01)
            return await super().reset(task, record_id=record_id)

        async def close(self) -> None:
            open_now.pop()

    tools = make_tools([CountedDesktop() for _ in range(6)], [DONE])
    await run_groups([task, task], group_plan, tools=tools, settings=settings)
    assert most_open == settings.desktop.num_replicas == 2


async def test_an_error_that_ends_the_run_is_raised_unchanged_and_every_desktop_is_released(
    task: Task, group_plan: GroupPlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktops = [fake_desktop() for _ in range(3)]
    tight = replace(settings, agent=settings.agent.model_copy(update={"max_context_tokens": 100}))
    with pytest.raises(RecipeError):
        await run_groups([task], group_plan, tools=make_tools(desktops, [DONE]), settings=tight)
    assert all(desktop.is_closed for desktop in desktops[:2])


async def test_the_error_of_a_run_without_any_desktop_says_so(
    task: Task, group_plan: GroupPlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktops = [fake_desktop(faults={"reset": EnvServerError("no env server answers at x")}) for _ in range(3)]
    (group,) = await run_groups([task], group_plan, tools=make_tools(desktops, [DONE]), settings=settings)
    with pytest.raises(EnvServerError, match="all 3 episodes ended in an env_fault; the first: no env server answers"):
        require_services(group.episodes)


def test_a_run_without_a_policy_engine_is_an_error_and_one_valid_episode_is_enough_to_continue() -> None:
    faults = [make_ended(f"e{index}", outcome=Outcome.POLICY_FAULT) for index in range(3)]
    with pytest.raises(EngineError, match="all 3 episodes ended in a policy_fault; the first: it was a policy_fault"):
        require_services(faults)
    mixed = [*faults, make_ended("e3", outcome=Outcome.ENV_FAULT)]
    with pytest.raises(EngineError, match="3 of 4 episodes ended in a policy_fault, the others in the other kind"):
        require_services(mixed)
    require_services([*mixed, make_ended("e4")])
    require_services([*mixed, make_ended("e4", outcome=Outcome.TIMEOUT)])
    require_services([])


def scripted(ends: dict[str, Outcome], received: list[str]) -> RunEpisode:
    """Episodes whose ids are in `ends` end with that outcome; all others fail at their task."""

    async def run(task: Task, plan: EpisodePlan) -> Episode:
        received.append(plan.episode_id)
        await asyncio.sleep(0)
        return make_ended(plan.episode_id, outcome=ends.get(plan.episode_id, Outcome.FAILURE))

    return run


async def test_faulty_members_run_again_under_names_of_their_own_until_enough_are_valid(
    task: Task, group_plan: GroupPlan
) -> None:
    ends = {"g-s00": Outcome.ENV_FAULT, "g-s02": Outcome.POLICY_FAULT, "g-s02-r1": Outcome.TIMEOUT}
    plan, received = replace(group_plan, max_resamples=3), list[str]()
    group = await run_group(replace(task, domain="vlc"), plan, "g", run_one=scripted(ends, received))
    assert (group.task_id, group.domain) == (task.task_id, "vlc")
    assert received == ["g-s00", "g-s01", "g-s02", "g-s00-r1", "g-s02-r1"]
    assert [episode.episode_id for episode in group.episodes] == received, "what was faulty stays on record"
    assert [episode.episode_id for episode in group.valid_episodes] == ["g-s01", "g-s00-r1"]


async def test_a_group_that_faults_repeatedly_ends_with_the_episodes_it_has(task: Task, group_plan: GroupPlan) -> None:
    received: list[str] = []
    ends = {f"g-s{sample:02d}{again}": Outcome.ENV_FAULT for sample in range(3) for again in ("", "-r1", "-r2")}
    group = await run_group(task, replace(group_plan, max_resamples=2), "g", run_one=scripted(ends, received))
    assert len(received) == len(set(received)) == 9
    assert group.valid_episodes == ()


async def test_a_group_with_enough_valid_episodes_is_not_run_again(task: Task, group_plan: GroupPlan) -> None:
    received: list[str] = []
    ends = {"g-s00": Outcome.ENV_FAULT}
    await run_group(task, replace(group_plan, max_resamples=2), "g", run_one=scripted(ends, received))
    assert received == ["g-s00", "g-s01", "g-s02"]


async def test_hundreds_of_episodes_are_in_flight_in_one_loop_and_none_is_left_behind(
    group_plan: GroupPlan, task: Task
) -> None:
    in_flight = most = 0

    async def run(task: Task, plan: EpisodePlan) -> Episode:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.2)
        in_flight -= 1
        return make_ended(plan.episode_id)

    started = time.monotonic()
    await run_group(task, replace(group_plan, group_size=300), "g", run_one=in_turn(run, 300))
    assert most == 300
    assert time.monotonic() - started < 5.0
    assert len(asyncio.all_tasks()) == 1
