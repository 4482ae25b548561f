"""The Slime dialect: what it writes is read back, a sloppy turn is still read, and a guess is marked."""

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.dialects.commands import to_command
from osworld_pipeline.dialects.keys import KEY_NAMES
from osworld_pipeline.dialects.slime_actions import action_from_call, normalise_action
from osworld_pipeline.errors import ActionParseError

DIALECT = load_dialect("slime")

points = st.lists(st.integers(0, 100_000), min_size=2, max_size=2)
tricky = st.sampled_from(
    [
        "</tool_call>",
        "<tool_call>",
        "<|im_end|>",
        "</s>",
        "```json",
        '"',
        "'",
        "\\",
        "\n",
        "é",
        "🙂",
        "\u2028",
        "{",
        "}",
    ]
)
texts = st.lists(st.text(st.characters(exclude_categories=("Cs",))) | tricky, min_size=1).map("".join).filter(len)
keys = st.sampled_from(sorted(KEY_NAMES)) | st.characters(categories=("L", "N", "P")).filter(
    lambda char: len(char) == 1 and char.isprintable()
)
actions = st.one_of(
    st.builds(
        lambda action, point: {"action": action, "coordinate": point},
        st.sampled_from(["left_click", "right_click", "middle_click", "double_click", "triple_click", "mouse_move"]),
        points,
    ),
    st.builds(lambda point: {"action": "left_click_drag", "end_coordinate": point}, points),
    st.builds(lambda text: {"action": "type", "text": text}, texts),
    st.builds(lambda names: {"action": "key", "keys": names}, st.lists(keys, min_size=1, max_size=8)),
    st.builds(
        lambda direction, amount: {"action": "scroll", "direction": direction, "amount": amount},
        st.sampled_from(["up", "down"]),
        st.integers(1, 1000),
    ),
    st.just({"action": "wait"}),
    st.builds(lambda status: {"action": "terminate", "status": status}, st.sampled_from(["success", "failure"])),
)


@given(action=actions, description=st.text() | tricky)
def test_what_format_writes_parse_reads_back(action: dict[str, Any], description: str) -> None:
    turn = DIALECT.parse(DIALECT.format(description, action))
    assert turn.arguments == action
    assert not turn.fallback_used


@given(action=actions, description=st.text() | tricky)
def test_the_stop_string_stands_only_at_the_end_of_a_formatted_turn(action: dict[str, Any], description: str) -> None:
    text = DIALECT.format(description, action)
    assert text.index("</tool_call>") == len(text) - len("</tool_call>")


@given(text=st.text() | st.lists(tricky | st.text(max_size=5)).map("".join))
def test_no_text_makes_parse_raise(text: str) -> None:
    turn = DIALECT.parse(text)
    assert (turn.arguments is None) == (turn.error is not None)


@given(action=actions)
def test_a_command_is_a_constant_or_a_call_with_literal_arguments(action: dict[str, Any]) -> None:
    command = to_command(action)
    if command in ("WAIT", "DONE", "FAIL"):
        return
    call = ast.parse(command, mode="eval").body
    assert isinstance(call, ast.Call)
    values = [ast.literal_eval(arg) for arg in call.args]
    if action["action"] == "type":
        assert values == [action["text"]]
    assert action_from_call(command) == action


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ({"action": "left_click", "coordinate": [3, 4]}, "pyautogui.click(3, 4)"),
        ({"action": "right_click", "coordinate": [3, 4]}, "pyautogui.rightClick(3, 4)"),
        ({"action": "double_click", "coordinate": [3, 4]}, "pyautogui.doubleClick(3, 4)"),
        ({"action": "middle_click", "coordinate": [3, 4]}, "pyautogui.middleClick(3, 4)"),
        ({"action": "triple_click", "coordinate": [3, 4]}, "pyautogui.tripleClick(3, 4)"),
        ({"action": "mouse_move", "coordinate": [3, 4]}, "pyautogui.moveTo(3, 4)"),
        ({"action": "left_click_drag", "end_coordinate": [3, 4]}, "pyautogui.dragTo(3, 4)"),
        ({"action": "type", "text": 'say "hi"\n'}, 'pyautogui.write("say \\"hi\\"\\n")'),
        ({"action": "key", "keys": ["enter"]}, 'pyautogui.press("enter")'),
        ({"action": "key", "keys": ["ctrl", "s"]}, 'pyautogui.hotkey("ctrl", "s")'),
        ({"action": "scroll", "direction": "down", "amount": 3}, "pyautogui.scroll(-3)"),
        ({"action": "scroll", "direction": "up", "amount": 5}, "pyautogui.scroll(5)"),
        ({"action": "wait"}, "WAIT"),
        ({"action": "terminate", "status": "success"}, "DONE"),
        ({"action": "terminate", "status": "failure"}, "FAIL"),
    ],
)
def test_each_action_becomes_its_command(arguments: dict[str, Any], command: str) -> None:
    assert to_command(arguments) == command


def test_a_point_is_scaled_to_the_screen() -> None:
    command = to_command({"action": "left_click", "coordinate": [10, 20]}, lambda x, y: (int(x * 2), int(y * 3)))
    assert command == "pyautogui.click(20, 60)"


CLICK = {"action": "left_click", "coordinate": [10, 20]}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            '<tool_call>{"name":"computer_use","arguments":{"action":"left_click","coordinate":[10,20]}}</tool_call>',
            CLICK,
        ),
        ('<tool_call>\n{"arguments": {"action": "left_click", "coordinate": [10, 20]}}\n', CLICK),
        ('<tool_call>{"arguments":"{\\"action\\":\\"left_click\\",\\"coordinate\\":[10,20]}"}</tool_call>', CLICK),
        ('<answer>{"action":"left_click","coordinate":[10.2,19.8]}</answer><|im_end|>', CLICK),
        ("<action>pyautogui.click(10, 20)</action>", CLICK),
        ('```json\n{"action":"left_click","coordinate":[10,20]}\n```', CLICK),
        ('Thinking {not json} first. {"action":"left_click","coordinate":[10,20]} ok', CLICK),
        ("I will do pyautogui.click(x=10, y=20) now", CLICK),
        ("noise pyautogui.write('a) b(') more)", {"action": "type", "text": "a) b("}),
        ("<answer>DONE</answer>", {"action": "terminate", "status": "success"}),
        ("Action: give up\nFAIL<|im_end|>", {"action": "terminate", "status": "failure"}),
        ("WAIT", {"action": "wait"}),
        ('<tool_call>{"action":"key","keys":"ctrl+S"}</tool_call>', {"action": "key", "keys": ["ctrl", "S"]}),
        ('<tool_call>{"action":"key","keys":["Return"]}</tool_call>', {"action": "key", "keys": ["enter"]}),
        (
            '<tool_call>{"action":"type","text":"a\nb ``` </tool_call> c"}</tool_call>',
            {"action": "type", "text": "a\nb ``` </tool_call> c"},
        ),
        (
            '<tool_call>{"action":"scroll","direction":"up"}</tool_call>',
            {"action": "scroll", "direction": "up", "amount": 3},
        ),
    ],
)
def test_known_forms_are_read_without_fallback(text: str, arguments: dict[str, Any]) -> None:
    turn = DIALECT.parse(text)
    assert turn.arguments == arguments
    assert not turn.fallback_used


def test_the_first_of_two_tool_calls_counts() -> None:
    first = DIALECT.format("a", {"action": "wait"})
    second = DIALECT.format("b", {"action": "terminate", "status": "success"})
    assert DIALECT.parse(f"{first}\n{second}").arguments == {"action": "wait"}


def test_a_tool_call_counts_before_an_answer() -> None:
    assert DIALECT.parse("<answer>DONE</answer>" + DIALECT.format("", CLICK)).arguments == CLICK


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"action":"left_click","coordinate":[10,20]', CLICK),
        ("please wait a moment", {"action": "wait"}),
        ("click at [10, 20]", CLICK),
        ("double click (10,20)", {"action": "double_click", "coordinate": [10, 20]}),
        ("a right click at [10, 20]", {"action": "right_click", "coordinate": [10, 20]}),
        ('type "hello there" now', {"action": "type", "text": "hello there"}),
        ("press ctrl+s to save", {"action": "key", "keys": ["ctrl", "s"]}),
        ("Press Enter.", {"action": "key", "keys": ["enter"]}),
        ("scroll down", {"action": "scroll", "direction": "down", "amount": 3}),
    ],
)
def test_a_guess_runs_and_is_marked(text: str, arguments: dict[str, Any]) -> None:
    turn = DIALECT.parse(text)
    assert turn.arguments == arguments
    assert turn.fallback_used


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I cannot help.",
        "press a button",
        '<tool_call>{"action":"fly","to":"moon"}</tool_call>',
        '<tool_call>{"action":"left_click","coordinate":[1]}</tool_call>',
        '<tool_call>{"action":"left_click","coordinate":[-1, 5]}</tool_call>',
        '<tool_call>{"action":"left_click","coordinate":[1e999, 5]}</tool_call>',
        '<tool_call>{"action":"type","text":"\\ud800"}</tool_call>',
        '<tool_call>{"action":"type"}</tool_call>',
        '<tool_call>{"action":"terminate"',
        "pyautogui.click(open('x'))",
        "{" * 5000,
        "[" * 100_000,
    ],
)
def test_a_turn_that_cannot_be_read_says_why(text: str) -> None:
    turn = DIALECT.parse(text)
    assert turn.arguments is None
    assert turn.action_type == "unknown"
    assert turn.error


def test_parse_strict_raises_for_an_unreadable_turn_and_accepts_a_guess() -> None:
    with pytest.raises(ActionParseError, match="no action could be read"):
        DIALECT.parse_strict("nothing here")
    assert DIALECT.parse_strict("scroll up").fallback_used


def test_the_description_is_the_action_line() -> None:
    assert DIALECT.parse(DIALECT.format("Click  the\nOK button", CLICK)).description == "Click the OK button"


def test_an_unknown_action_cannot_be_formatted() -> None:
    with pytest.raises(ActionParseError, match="unknown action 'fly'"):
        DIALECT.format("fly", {"action": "fly"})


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(ActionParseError, match="unknown key 'hyper'"):
        normalise_action({"action": "key", "keys": ["hyper"]})


def test_the_full_prompt_shows_every_action_and_parses_as_the_dialect_writes_it() -> None:
    prompt = DIALECT.system_prompt("full")
    for name in (
        "left_click",
        "right_click",
        "double_click",
        "left_click_drag",
        "type",
        "key",
        "scroll",
        "wait",
        "terminate",
    ):
        assert f'"{name}"' in prompt
    examples = [line[2 : line.rindex("}") + 1] for line in prompt.splitlines() if line.startswith('- {"action":"key"')]
    assert normalise_action(json.loads(examples[0])) == {"action": "key", "keys": ["ctrl", "s"]}
    assert len(DIALECT.system_prompt("short")) < 120


def test_an_unknown_dialect_or_prompt_is_named() -> None:
    with pytest.raises(ValueError, match="no dialect named 'klingon'"):
        load_dialect("klingon")
    with pytest.raises(ValueError, match="no system prompt named 'long'"):
        DIALECT.system_prompt("long")


@pytest.mark.parametrize(
    ("call", "action"),
    [
        ("pyautogui.click(1, 2, clicks=3)", "triple_click"),
        ("pyautogui.click(1, 2, 2)", "double_click"),
        ("pyautogui.click(x=1, y=2, button='middle')", "middle_click"),
        ("pyautogui.tripleClick(1, 2)", "triple_click"),
        ("pyautogui.moveTo(1, 2, duration=0.5)", "mouse_move"),
    ],
)
def test_a_call_at_a_point_is_read_as_its_action(call: str, action: str) -> None:
    assert DIALECT.parse(call).arguments == {"action": action, "coordinate": [1, 2]}


def test_a_click_with_a_list_for_a_button_raises_nothing() -> None:
    assert DIALECT.parse("pyautogui.click(1, 2, button=['left'], clicks=[2])").action_type == "left_click"
