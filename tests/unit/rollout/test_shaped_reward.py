"""The shaped reward, term by term, against numbers calculated by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.domain.episode import StepSignals
from osworld_pipeline.recipes.schema import RewardSection
from osworld_pipeline.rollout.reward import (
    efficiency,
    partial_score,
    partial_terms,
    penalty_terms,
    shape_reward,
    tool_calling,
)


def step(action_type: str = "type", **fields: object) -> StepSignals:
    return StepSignals(
        **{"action_type": action_type, "action_parsed": action_type != "unknown", "action_executed": True, **fields}  # type: ignore[arg-type]
    )


CLICK = step("left_click", coordinate=(1, 2))
TYPE = step("type")
KEY = step("key")
WAIT = step("wait")
DONE = step("terminate")
UNKNOWN = step("unknown", action_executed=False)


def only(**weights: float) -> RewardSection:
    """A section in which every weight but these is zero."""
    names = (
        "action_parse_valid action_executed a11y_grounding tool_calling efficiency screen_change a11y_change "
        "terminal_change"
    )
    return RewardSection(**{**dict.fromkeys(names.split(), 0.0), **weights})  # type: ignore[arg-type]


def score(steps: list[StepSignals], section: RewardSection, *, has_a11y_tree: bool = True) -> float:
    terms = partial_terms(steps, max_steps=8, complexity=section.complexity)
    return partial_score(terms, section=section, has_a11y_tree=has_a11y_tree)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (only(action_parse_valid=1.0), "action_parsed"),
        (only(action_executed=1.0), "action_executed"),
        (only(a11y_grounding=1.0), "a11y_grounded"),
        (only(screen_change=1.0), "screen_changed"),
        (only(a11y_change=1.0), "a11y_changed"),
        (only(terminal_change=1.0), "terminal_changed"),
    ],
)
def test_a_process_term_is_the_mean_of_its_flag(section: RewardSection, field: str) -> None:
    steps = [step(**{field: flag}) for flag in (True, False, True, True)]
    assert score(steps, section) == pytest.approx(0.75)


def test_without_a_tree_both_tree_weights_are_zero_and_the_section_is_untouched() -> None:
    section = only(a11y_grounding=0.3, a11y_change=0.05)
    steps = [step(a11y_grounded=True, a11y_changed=True)]
    assert score(steps, section, has_a11y_tree=False) == 0.0
    assert score(steps, section) == pytest.approx(0.35)


def test_efficiency_is_the_share_of_turns_left() -> None:
    assert efficiency(0, max_steps=8) == 1.0
    assert efficiency(2, max_steps=8) == 0.75
    assert efficiency(9, max_steps=8) == 0.0


@pytest.mark.parametrize(
    ("steps", "complexity", "expected"),
    [
        # two of three types, inside 2..5, modalities click and type
        ([CLICK, TYPE], "low", 0.4 * 2 / 3 + 0.4 + 0.2),
        # one type, 1 of 2 steps, one modality
        ([TYPE], "low", 0.4 / 3 + 0.4 / 2 + 0.2 / 2),
        # terminate is a type but not a modality
        ([CLICK, TYPE, DONE], "low", 0.4 + 0.4 + 0.2),
        # eight steps where five were expected: 5/8
        ([CLICK] * 8, "low", 0.4 / 3 + 0.4 * 5 / 8 + 0.1),
        # twenty steps: 5/20 is raised to one half
        ([CLICK] * 20, "low", 0.4 / 3 + 0.4 / 2 + 0.1),
        # a drag is named click and drag
        ([step("left_click_drag")] * 2, "low", 0.4 / 3 + 0.4 + 0.2),
        ([CLICK, TYPE], "medium", 0.4 * 2 / 3 + 0.4 * 2 / 5 + 0.2),
        ([CLICK, TYPE], "high", 0.4 * 2 / 3 + 0.4 * 2 / 10 + 0.2),
        ([], "low", 0.0),
        ([UNKNOWN], "low", 0.0),
    ],
)
def test_the_tool_calling_term_is_the_value_calculated_by_hand(
    steps: list[StepSignals], complexity: str, expected: float
) -> None:
    assert tool_calling(steps, complexity=complexity) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], 0.0),
        ([TYPE], 0.0),
        # one repeat in two steps: .40 / 2
        ([CLICK, CLICK], 0.20),
        # a click at another place is not a repeat
        ([CLICK, step("left_click", coordinate=(9, 9))], 0.0),
        # nine repeats in ten: .36, capped at .30
        ([CLICK] * 10, 0.30),
        # one unknown in four: .30 / 4
        ([CLICK, TYPE, UNKNOWN, KEY], 0.075),
        # three unknown in four: .225 capped at .15, and two repeats in four
        ([TYPE, UNKNOWN, UNKNOWN, UNKNOWN], 0.15 + 0.20),
        # a single step is neither a repeat nor invalid
        ([UNKNOWN], 0.0),
        # one fallback of two: .25
        ([step("type", fallback_used=True), KEY], 0.25),
        ([step("type", fallback_used=True)], 0.5),
        # one wait of three: .1
        ([TYPE, WAIT, KEY], 0.1),
        # two waits: .3, and one repeat in two
        ([WAIT, WAIT], 0.3 + 0.2),
    ],
)
def test_the_penalties_are_the_values_calculated_by_hand(steps: list[StepSignals], expected: float) -> None:
    assert sum(penalty_terms(steps).values()) == pytest.approx(expected)


def test_the_shaped_reward_is_the_value_calculated_by_hand() -> None:
    # All parsed and executed, one of two screens changed: .10 + .15 + .05/2; tool calling .25 * (4/15 + .4 + .1);
    # efficiency .05 * 6/8. No penalty: type, then terminate.
    steps = [step("type", screen_changed=True), DONE]
    partial = 0.10 + 0.15 + 0.025 + 0.25 * (0.4 * 2 / 3 + 0.4 + 0.1) + 0.05 * 0.75
    reward = shape_reward(0.0, steps, max_steps=8, section=RewardSection(), has_a11y_tree=False)
    assert reward.partial == pytest.approx(partial)
    assert reward.shaped == pytest.approx(0.3 * partial)
    assert (reward.task, reward.penalty) == (0.0, 0.0)
    assert shape_reward(1.0, steps, max_steps=8, section=RewardSection(), has_a11y_tree=False).shaped == 1.0


@given(
    steps=st.lists(st.sampled_from([CLICK, TYPE, KEY, WAIT, DONE, UNKNOWN]), max_size=30),
    task=st.floats(0, 1),
    has_a11y_tree=st.booleans(),
)
def test_the_shaped_reward_stays_within_0_and_1(steps: list[StepSignals], task: float, has_a11y_tree: bool) -> None:
    reward = shape_reward(task, steps, max_steps=8, section=RewardSection(), has_a11y_tree=has_a11y_tree)
    assert 0.0 <= reward.shaped <= 1.0
    assert 0.0 <= reward.partial <= 1.0 + 1e-9
    assert reward.task == task


episodes = st.lists(st.sampled_from([CLICK, TYPE, KEY, WAIT, DONE, UNKNOWN]), max_size=30)
bounded_sections = st.builds(
    RewardSection,
    shaping=st.just("bounded"),
    alpha=st.floats(0, 3),
    success_threshold=st.floats(0.01, 1),
    partial_tasks=st.booleans(),
    action_executed=st.floats(0, 5),
)


def shaped(task: float, steps: list[StepSignals], section: RewardSection) -> float:
    return shape_reward(task, steps, max_steps=8, section=section, has_a11y_tree=True).shaped


@given(section=bounded_sections, failed=episodes, solved=episodes, task=st.floats(0, 1), success=st.floats(0, 1))
def test_bounded_shaping_gives_every_failure_less_than_any_success(
    section: RewardSection, failed: list[StepSignals], solved: list[StepSignals], task: float, success: float
) -> None:
    threshold = section.success_threshold
    failure = shaped(min(task, math.nextafter(threshold, 0)), failed, section)
    assert 0 <= failure < threshold <= shaped(max(success, threshold), solved, section)


@given(section=bounded_sections, steps=episodes, tasks=st.lists(st.floats(0, 1), min_size=2, max_size=2))
def test_bounded_shaping_never_gives_less_for_a_higher_task_reward(
    section: RewardSection, steps: list[StepSignals], tasks: list[float]
) -> None:
    worse, better = sorted(tasks)
    assert shaped(worse, steps, section) <= shaped(better, steps, section) + 1e-12


@given(section=bounded_sections, steps=episodes, task=st.floats(0, 1))
def test_shaping_is_deterministic(section: RewardSection, steps: list[StepSignals], task: float) -> None:
    assert shaped(task, steps, section) == shaped(task, list(steps), section.model_copy())


def test_bounded_shaping_gives_the_values_calculated_by_hand() -> None:
    # One executed step of one weight: the process score is 1; alpha 0.4 scales it below the threshold 0.5.
    weights = only(action_executed=1.0).model_dump()
    section = RewardSection(**{**weights, "shaping": "bounded", "alpha": 0.4})
    assert shaped(0.0, [TYPE], section) == pytest.approx(0.5 * 0.4)
    assert shaped(0.25, [TYPE], section) == pytest.approx(0.5 * 0.4)
    assert shaped(0.75, [TYPE], section) == 0.75
    kept = section.model_copy(update={"partial_tasks": True})
    assert shaped(0.25, [TYPE], kept) == pytest.approx(0.25 + 0.25 * 0.4)
    # Nothing parsed, or ten repeats of one click: a process score below 0 counts as 0.
    assert shaped(0.0, [UNKNOWN], section) == 0.0


def test_without_shaping_the_reward_is_that_of_the_grader() -> None:
    section = RewardSection(shaping="none")
    assert [shaped(task, [CLICK] * 9, section) for task in (0.0, 0.3, 1.0)] == [0.0, 0.3, 1.0]
