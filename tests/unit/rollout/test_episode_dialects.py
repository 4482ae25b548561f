"""Episodes in every dialect, in windows and without screenshots: actions are run, shown screenshots are trained on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import ContextMode, Outcome
from osworld_pipeline.domain.task import Task
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeSettings, EpisodeTools, run_episode
from osworld_pipeline.rollout.trajectories import episode_trajectories

Tools = Callable[..., EpisodeTools]


def with_agent(settings: EpisodeSettings, **changes: Any) -> EpisodeSettings:
    return replace(settings, agent=settings.agent.model_copy(update=changes))


@pytest.mark.parametrize(
    ("dialect", "space", "answers", "commands"),
    [
        # The screen has 64x64 pixels. Thousandths and fractions of it are converted to pixels.
        ("slime", "thousand", ['{"action":"left_click","coordinate":[500,250]}'], ["pyautogui.click(32, 16)"]),
        ("slime", "unit", ['{"action":"left_click","coordinate":[0.5,0.25]}'], ["pyautogui.click(32, 16)"]),
        ("osgym", "dialect", ["<|action_start|>click(500,250)<|action_end|>"], ["pyautogui.click(32, 16)"]),
        ("sendkey", "dialect", ["<action>typeline dir</action>"], ['pyautogui.write("dir\\n")']),
        (
            "pyautogui",
            "dialect",
            ["```python\npyautogui.click(1, 2)\npyautogui.press('tab')\n```"],
            ['pyautogui.click(1, 2)\npyautogui.press("tab")'],
        ),
    ],
)
async def test_the_actions_of_a_dialect_are_executed_on_the_screen(
    dialect: str,
    space: str,
    answers: list[str],
    commands: list[str],
    task: Task,
    plan: EpisodePlan,
    settings: EpisodeSettings,
    make_tools: Tools,
    fake_desktop: Any,
) -> None:
    desktop = fake_desktop()
    done = load_dialect(dialect, space).format("", {"action": "terminate", "status": "success"})
    changed = with_agent(settings, dialect=dialect, coordinate_space=space)
    episode = await run_episode(task, plan, tools=make_tools([desktop], [*answers, done]), settings=changed)
    assert desktop.commands == [*commands, "DONE"]
    used = load_dialect(dialect, space)
    assert (episode.dialect, episode.coordinate_space) == (used.name, used.coordinate_space)
    assert episode.outcome is Outcome.SUCCESS
    assert all(step.signals.action_executed for step in episode.steps)


async def test_a_turn_that_acts_and_ends_the_task_does_both(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    desktop = fake_desktop()
    answer = "<|action_start|>press(enter)&finish()<|action_end|>"
    tools = make_tools([desktop], [answer])
    episode = await run_episode(task, plan, tools=tools, settings=with_agent(settings, dialect="osgym"))
    assert desktop.commands == ['pyautogui.press("enter")', "DONE"]
    assert (episode.outcome, len(episode.steps)) == (Outcome.SUCCESS, 1)
    assert episode.steps[0].command == 'pyautogui.press("enter")\nDONE'
    assert episode.steps[0].signals.action_type == "key+terminate"


@pytest.mark.parametrize("show_screenshots", [True, False])
async def test_each_turn_of_a_window_trains_on_the_screenshots_that_it_showed(
    show_screenshots: bool,
    task: Task,
    plan: EpisodePlan,
    settings: EpisodeSettings,
    make_tools: Tools,
    fake_desktop: Any,
) -> None:
    tools = make_tools([fake_desktop()], ['{"action":"type","text":"a"}'])
    changed = with_agent(settings, context_mode="window", window_screenshots=2, show_screenshots=show_screenshots)
    episode = await run_episode(task, plan, tools=tools, settings=changed)
    assert episode.context_mode is ContextMode.WINDOW
    blobs = tools.sink.blobs  # type: ignore[attr-defined]
    # The screenshots are stored with their steps even where the model does not see them.
    assert {step.screenshot_sha256 for step in episode.steps} == set(blobs)
    trajectories = episode_trajectories(episode, blobs.__getitem__)
    requests = tools.engine.requests  # type: ignore[attr-defined]
    assert [len(request.images) for request in requests] == ([1, 2, 2] if show_screenshots else [0, 0, 0])
    for request, trajectory in zip(requests, trajectories, strict=True):
        assert tuple(trajectory.images) == request.images
        assert trajectory.token_ids[: len(request.token_ids)] == request.token_ids
        assert trajectory.episode_id == episode.episode_id
        assert trajectory.temperature == episode.sampling.temperature


async def test_the_recipes_threshold_decides_what_a_success_is(
    task: Task, plan: EpisodePlan, settings: EpisodeSettings, make_tools: Tools, fake_desktop: Any
) -> None:
    strict = replace(settings, reward=settings.reward.model_copy(update={"success_threshold": 0.9}))
    done = load_dialect("slime").format("", {"action": "terminate", "status": "success"})
    for chosen, outcome in ((settings, Outcome.SUCCESS), (strict, Outcome.FAILURE)):
        tools = make_tools([fake_desktop(reward=0.7)], [done])
        assert (await run_episode(task, plan, tools=tools, settings=chosen)).outcome is outcome
