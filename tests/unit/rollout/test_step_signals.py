"""The effects of an action, measured on observations made by hand."""

import io

import pytest
from PIL import Image

from osworld_pipeline.dialects import ParsedTurn, load_dialect
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.episode import StepSignals
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.errors import ReplicaError
from osworld_pipeline.rollout.signals import screen_diff, step_signals, target_element

DIALECT = load_dialect("slime")
CLICK_OK = DIALECT.parse(DIALECT.format('Click "OK"', {"action": "left_click", "coordinate": [5, 6]}))


def grey(level: int, size: tuple[int, int] = (64, 64)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (level,) * 3).save(buffer, format="PNG")
    return buffer.getvalue()


def signals(turn: ParsedTurn, before: Observation, after: Observation) -> StepSignals:
    return step_signals(turn, before, after, executed=True, error=None, diff_threshold=0.005)


def test_the_difference_of_two_grey_screens_is_the_distance_of_their_levels() -> None:
    assert screen_diff(grey(0), grey(51)) == pytest.approx(51 / 255)
    assert screen_diff(grey(0), grey(255, (512, 320))) == pytest.approx(1.0)
    assert screen_diff(grey(7), grey(7)) == 0.0


@pytest.mark.parametrize(("level", "changed"), [(101, False), (102, True)])
def test_a_screen_counts_as_changed_only_from_the_threshold_on(level: int, changed: bool) -> None:
    # One level of 255 is 0.0039, two are 0.0078; the threshold 0.005 lies between.
    result = signals(CLICK_OK, Observation(screenshot=grey(100)), Observation(screenshot=grey(level)))
    assert result.screen_changed is changed


def test_a_target_named_in_the_tree_before_the_action_is_grounded() -> None:
    before = Observation(screenshot=grey(0), accessibility_tree="<button name='ok'/>", terminal="$")
    after = Observation(screenshot=grey(9), accessibility_tree="<window/>", terminal="$ ls")
    result = signals(CLICK_OK, before, after)
    assert (result.target_element, result.a11y_grounded, result.coordinate) == ("OK", True, (5, 6))
    assert (result.a11y_changed, result.terminal_changed) == (True, True)
    # 19 characters became 9.
    assert result.a11y_delta == pytest.approx(10 / 19)
    assert result.screen_hash == digest_bytes(after.screenshot)


def test_a_target_named_only_in_the_tree_after_the_action_is_not_grounded() -> None:
    before = Observation(screenshot=grey(0), accessibility_tree="<window/>")
    after = Observation(screenshot=grey(0), accessibility_tree="<button name='OK'/>" * 50)
    result = signals(CLICK_OK, before, after)
    assert not result.a11y_grounded
    assert result.a11y_delta == 1.0


def test_without_a_tree_and_a_terminal_neither_counts_as_changed() -> None:
    result = signals(CLICK_OK, Observation(screenshot=grey(0)), Observation(screenshot=grey(0)))
    assert (result.a11y_grounded, result.a11y_delta, result.a11y_changed, result.terminal_changed) == (
        False,
        0,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("description", "target"),
    [
        ('Click the "Save as" button', "Save as"),
        ("Click on the Cancel button", "Cancel"),
        ("Open the Documents folder.", "Documents"),
        ("Type a word", None),
        ("", None),
    ],
)
def test_the_target_is_the_element_that_the_description_names(description: str, target: str | None) -> None:
    assert target_element(description) == target


def test_a_screenshot_that_is_not_an_image_is_a_fault_of_the_replica() -> None:
    with pytest.raises(ReplicaError, match="is not an image"):
        signals(CLICK_OK, Observation(screenshot=grey(0)), Observation(screenshot=b"garbage"))
