"""For every dialect and every coordinate space: an action that is written is read back, no text raises, and a desktop
accepts every command."""

from typing import Any

import pytest
from dialect_samples import DIALECTS, actions, tricky
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from osworld_pipeline.agent.images import ModelImage
from osworld_pipeline.dialects import GRAMMARS, Dialect, load_dialect
from osworld_pipeline.dialects.actions import actions_in, ends_episode, first_point, move_points
from osworld_pipeline.dialects.commands import split_command
from osworld_pipeline.domain.pyautogui import SPECIAL_ACTIONS, parse_pyautogui
from osworld_pipeline.errors import ActionParseError

every_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
noise = st.text() | st.lists(tricky | st.text(max_size=5)).map("".join)


def cannot_say(dialect: Dialect, action: dict[str, Any]) -> bool:
    """The known gaps: actions that no text of the dialect can express."""
    if dialect.grammar.name == "sendkey":
        return any(one.get("seconds", 0) > 10 for one in actions_in(action))
    if dialect.grammar.name != "osgym":
        return False
    for one in actions_in(action):
        if one["action"] == "scroll" and "coordinate" not in one:
            return True
        if one["action"] == "left_click_drag" and "start_coordinate" not in one:
            return True
        if one.get("seconds", 2.0 if action["action"] == "sequence" else None) not in (None, 2.0):
            return True
        if one["action"] == "wait" and "seconds" in one and action["action"] != "sequence":
            return True
        if "," in one.get("keys", ()) and len(one["keys"]) > 1:
            return True
        # Text is not escaped between the parentheses, so the end of a call also ends the text.
        if any(end in one.get("text", "") for end in ("<|action_end|>", ")&", ") &", ")\n&")):
            return True
    return False


@every_dialect
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_a_dialect_writes_it_reads_back(dialect: Dialect, data: st.DataObject) -> None:
    action, description = data.draw(actions(dialect)), data.draw(noise)
    assume(not cannot_say(dialect, action))
    turn = dialect.parse(dialect.format(description, action))
    assert turn.arguments == action
    assert not turn.fallback_used


@every_dialect
@settings(max_examples=20, deadline=None)
@given(text=noise)
def test_no_text_makes_a_dialect_raise(dialect: Dialect, text: str) -> None:
    turn = dialect.parse(text)
    assert (turn.arguments is None) == (turn.error is not None) == (turn.action_type == "unknown")


@every_dialect
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_command_is_one_that_a_desktop_accepts(dialect: Dialect, data: st.DataObject) -> None:
    action = data.draw(actions(dialect))
    image = ModelImage(data=b"", format="png", width=1312, height=736, screen_width=1920, screen_height=1080, sha256="")
    command = dialect.to_command(action, lambda x, y: image.to_screen(x, y, dialect.coordinate_space))
    parts = split_command(command)
    for part in parts:
        assert part in SPECIAL_ACTIONS or parse_pyautogui(part)
    assert (parts[-1] in ("DONE", "FAIL")) == ends_episode(action)


@every_dialect
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_stop_string_stands_only_at_the_end_of_a_turn(dialect: Dialect, data: st.DataObject) -> None:
    action = data.draw(actions(dialect))
    assume(not cannot_say(dialect, action))
    text = dialect.format("Go on", action)
    assert all(text.find(stop) in (-1, len(text) - len(stop)) for stop in dialect.stop)
    assert not dialect.stop or any(text.endswith(stop) for stop in dialect.stop)


@every_dialect
@pytest.mark.parametrize("screen", [(1920, 1080), (1312, 736), (1023, 767)])
def test_a_point_of_the_screen_comes_back_from_any_coordinates(dialect: Dialect, screen: tuple[int, int]) -> None:
    image = ModelImage(
        data=b"", format="png", width=1312, height=736, screen_width=screen[0], screen_height=screen[1], sha256=""
    )
    space = dialect.coordinate_space
    off = max(screen[0] / 1312, screen[1] / 736, 1) if space == "model_pixels" else screen[0] / 1000
    for x, y in ((0, 0), (screen[0] // 3, screen[1] // 7), (screen[0] - 1, screen[1] - 1)):
        back = image.to_screen(*image.from_screen(x, y, space), space)
        assert abs(back[0] - x) <= off
        assert abs(back[1] - y) <= off


@every_dialect
def test_the_prompts_name_the_coordinate_space(dialect: Dialect) -> None:
    full, short = dialect.system_prompt("full"), dialect.system_prompt("short")
    assert "<coordinates>" not in full + short
    assert len(short) < 120
    said = {"model_pixels": "pixels of the screenshot", "unit": "from 0 to 1 ", "thousand": "from 0 to 1000"}
    assert said[dialect.coordinate_space] in full
    assert ("Coordinates: 0 to" in short) == (dialect.coordinate_space != "model_pixels")


def test_a_dialect_is_found_again_by_its_name() -> None:
    assert [load_dialect(dialect.name) for dialect in DIALECTS] == DIALECTS
    assert {load_dialect(name).name for name in GRAMMARS} >= {"slime", "pyautogui", "sendkey", "osgym"}
    assert load_dialect("osgym", "model_pixels").name == "osgym@model_pixels"
    with pytest.raises(ValueError, match="no coordinate space named 'miles'"):
        load_dialect("slime", "miles")


def test_coordinates_beyond_their_space_are_refused() -> None:
    assert load_dialect("osgym").parse("<|action_start|>click(1001,2)<|action_end|>").error
    unit = load_dialect("slime@unit")
    assert unit.parse(unit.format("", {"action": "left_click", "coordinate": [0.25, 1]})).is_parsed
    assert "from 0 to 1" in (unit.parse('{"action":"left_click","coordinate":[10,20]}').error or "")


def test_a_guess_reads_coordinates_of_the_dialect() -> None:
    assert load_dialect("slime@unit").parse("click at (0.5, .25)").arguments == {
        "action": "left_click", "coordinate": [0.5, 0.25],
    }  # fmt: skip


def test_points_of_a_sequence_move_together() -> None:
    action = {
        "action": "sequence",
        "actions": [
            {"action": "left_click", "coordinate": [1, 2]},
            {"action": "left_click_drag", "start_coordinate": [3, 4], "end_coordinate": [5, 6]},
        ],
    }
    moved = move_points(action, lambda x, y: (10 * x, 10 * y))
    assert first_point(moved) == [10, 20]
    assert moved["actions"][1]["end_coordinate"] == [50, 60]


def test_a_turn_over_a_limit_or_with_an_action_after_its_end_is_refused() -> None:
    dialect = load_dialect("pyautogui")
    with pytest.raises(ActionParseError, match="the turn has 40 actions"):
        dialect.format("", {"action": "sequence", "actions": [{"action": "left_click"}] * 40})
    with pytest.raises(ActionParseError, match="longer than 60 s"):
        dialect.format("", {"action": "sequence", "actions": [{"action": "wait", "seconds": 50}] * 2})
    with pytest.raises(ActionParseError, match="too long to be typed"):
        dialect.format("", {"action": "type", "text": "x" * 40_000})
    with pytest.raises(ActionParseError, match="no action is possible after the end"):
        dialect.format("", {"action": "sequence", "actions": [{"action": "terminate"}, {"action": "left_click"}]})


@every_dialect
@pytest.mark.parametrize("digits", [401, 5_000])
@pytest.mark.parametrize("sign", ["", "-"])
def test_a_number_of_any_length_is_read_or_refused(dialect: Dialect, digits: int, sign: str) -> None:
    """A policy that repeats a digit writes a number that no float holds."""
    number = sign + "9" * digits
    for written in (
        _called(f'"action": "left_click", "coordinate": [{number}, 3]'),
        _called(f'"action": "wait", "seconds": {number}'),
        _called(f'"action": "scroll", "direction": "up", "amount": {number}'),
        f"```python\npyautogui.click({number}, 3)\n```",
        f"```python\npyautogui.scroll({number})\n```",
        f"```python\ntime.sleep({number})\n```",
        f"<action>click {number} {number}</action>",
        f"<action>wait {number}s</action>",
        f"click({number}, 3)",
        f"scroll({number})",
    ):
        turn = dialect.parse(written)
        assert turn.arguments is not None or turn.error


def _called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "computer_use", "arguments": {{{arguments}}}}}\n</tool_call>'
