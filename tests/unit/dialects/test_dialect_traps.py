"""The traps of the dialects of AReaL's example, the Windows example and OSGym, each by name."""

from typing import Any

import pytest

from env_server.providers.qemu.qmp_input import qcodes_of
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.dialects.commands import split_command

PYAUTOGUI, SENDKEY, OSGYM = load_dialect("pyautogui"), load_dialect("sendkey"), load_dialect("osgym")
CLICK = {"action": "left_click", "coordinate": [10, 20]}
DONE = {"action": "terminate", "status": "success"}
FAIL = {"action": "terminate", "status": "failure"}


@pytest.mark.parametrize("tag", ["", "python", "Python", "py", "bash", "sh", "pyautogui"])
def test_the_tag_of_a_fence_does_not_leak_into_the_code(tag: str) -> None:
    assert PYAUTOGUI.parse(f"I click.\n```{tag}\npyautogui.click(10, 20)\n```").arguments == CLICK


@pytest.mark.parametrize(
    "text",
    [
        "```python pyautogui.click(10, 20)```",
        "```pyautogui.click(10, 20)```",
        "```python\npyautogui.click(10, 20)",
        "```python\nimport pyautogui\nimport time\n# the button\npyautogui.click(x=10, y=20)\n```<|im_end|>",
        "```\nthe first block is no action\n```\nthen\n```\npyautogui.click((10, 20))\n```\n``` ```",
    ],
)
def test_a_fence_on_one_line_or_never_closed_is_read(text: str) -> None:
    assert PYAUTOGUI.parse(text).arguments == CLICK


@pytest.mark.parametrize(
    "text", ["DONE", "done", "DONE.", "It is saved.\n**DONE**\n", "```\nDONE\n```", "```DONE\n```"]
)
def test_done_is_understood_with_marks_around_it(text: str) -> None:
    assert PYAUTOGUI.parse(text).arguments == DONE


def test_a_word_inside_a_sentence_is_not_an_action() -> None:
    assert PYAUTOGUI.parse("I am not DONE yet, so I look again.").error


def test_code_has_priority_over_done_and_both_count_if_done_follows_the_code() -> None:
    code = "```python\npyautogui.click(10, 20)\n```"
    assert PYAUTOGUI.parse(f"When I am ready I say\nDONE\n{code}").arguments == CLICK
    assert PYAUTOGUI.parse(f"{code}\nWAIT").arguments == CLICK
    both = PYAUTOGUI.parse(f"{code}\nDONE").arguments
    assert both == {"action": "sequence", "actions": [CLICK, DONE]}
    assert both is not None
    assert split_command(PYAUTOGUI.to_command(both)) == ("pyautogui.click(10, 20)", "DONE")


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.system('ls')",
        "x = 3\npyautogui.click(x, x)",
        "for i in range(3): pyautogui.click(1, 1)",
        "pyautogui.click(f'{1}', 2)",
        "pyautogui.moveRel(5, 5)",
        "pyautogui.click(-1, 5)",
        "pyautogui.press('hyper')",
        "print('hello')",
    ],
)
def test_code_that_is_not_a_known_call_is_an_error_and_runs_nothing(code: str) -> None:
    turn = PYAUTOGUI.parse(f"```python\n{code}\n```")
    assert turn.arguments is None
    assert turn.error


@pytest.mark.parametrize(
    ("code", "commands"),
    [
        ("pyautogui.press('tab', presses=2)", ['pyautogui.press("tab")'] * 2),
        ("pyautogui.press(['up', 'enter'])", ['pyautogui.press("up")', 'pyautogui.press("enter")']),
        ("pyautogui.typewrite(['a', 'enter'])", ['pyautogui.press("a")', 'pyautogui.press("enter")']),
        ("pyautogui.click(1, 2, clicks=2)", ["pyautogui.doubleClick(1, 2)"]),
        ("pyautogui.click(1, 2, 1, 0.1, 'right')", ["pyautogui.rightClick(1, 2)"]),
        ("pyautogui.click()", ["pyautogui.click()"]),
        ("pyautogui.scroll(-5, 1, 2)", ["pyautogui.moveTo(1, 2)", "pyautogui.scroll(-5)"]),
        ("pyautogui.hscroll(-5)", ["pyautogui.hscroll(-5)"]),
        ("pyautogui.moveTo(1, 2)\npyautogui.dragTo(3, 4, 1)", ["pyautogui.moveTo(1, 2)", "pyautogui.dragTo(3, 4)"]),
        ("pyautogui.mouseDown(1, 2)", ["pyautogui.moveTo(1, 2)", "pyautogui.mouseDown(button='left')"]),
        ("pyautogui.keyDown('ctrl')", ['pyautogui.keyDown("ctrl")']),
        ("pyautogui.hotkey(['ctrl', 'c'])", ['pyautogui.hotkey("ctrl", "c")']),
        ("time.sleep(1.5)", ["time.sleep(1.5)"]),
    ],
)  # fmt: skip
def test_pyautogui_calls_become_their_commands(code: str, commands: list[str]) -> None:
    arguments = PYAUTOGUI.parse_strict(f"```python\n{code}\n```").arguments
    assert arguments is not None
    assert PYAUTOGUI.to_command(arguments).split("\n") == commands


def test_the_plan_before_the_code_is_the_description() -> None:
    assert (
        PYAUTOGUI.parse("I click\n  the button.\n```\npyautogui.click(1, 2)\n```").description == "I click the button."
    )


def key(*names: str) -> dict[str, Any]:
    return {"action": "key", "keys": list(names)}


def typed(text: str) -> dict[str, Any]:
    return {"action": "type", "text": text}


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("sendkey ret", key("enter")),
        ("sendkey spc", key("space")),
        ("sendkey meta_l-r", key("win", "r")),
        ("sendkey ctrl alt delete", key("ctrl", "alt", "delete")),
        ("sendkey pgdn", key("pagedown")),
        ("sendkey -", key("-")),
        ("SENDKEY alt-f4", key("alt", "f4")),
        ("type hello world", typed("hello world")),
        ("type\nhello", typed("hello")),
        ('type "hello"', typed("hello")),
        ("type 'hello'", typed("hello")),
        ("type Set-Content -Path 'C:\\a.txt' -Value 'x'", typed("Set-Content -Path 'C:\\a.txt' -Value 'x'")),
        ("type 'a' 'b'", typed("'a' 'b'")),
        ("type a && b < c > d", typed("a && b < c > d")),
        ("type one\ntwo", typed("one\ntwo")),
        ("typeline notepad", typed("notepad\n")),
        ("typeline", typed("\n")),
        ("wait 3", {"action": "wait", "seconds": 3.0}),
        ("wait 3600", {"action": "wait", "seconds": 10.0}),
        ("wait a while", {"action": "wait", "seconds": 2.0}),
        ("wait nan", {"action": "wait", "seconds": 2.0}),
        ("wait -1", {"action": "wait", "seconds": 0.0}),
    ],
)
def test_a_tag_is_read_with_quemus_keys_and_the_texts_own_quotes(body: str, arguments: dict[str, Any]) -> None:
    turn = SENDKEY.parse(f"I see the desktop.\n<action>{body}</action>")
    assert turn.arguments == arguments
    assert turn.description == "I see the desktop."


@pytest.mark.parametrize(
    "body",
    [
        *("sendkey ret\nquit", "sendkey ret; quit", "sendkey", "sendkey ctrl--x", "type", "", " ", "ret"),
        *("system_reset", "hmp quit", "sendkey ret 100\nscreendump /etc/shadow", "sendkey \x00"),
        *("click 1", "click 1 2 3", "click x y", "click -1 5", "click nan 2", "drag 1 2 3", "scroll sideways 3"),
        *("scroll", "scroll up many", "scroll up 0", "scroll up 3 4"),
    ],
)
def test_only_keys_and_verbs_reach_a_monitor_and_anything_else_is_refused(body: str) -> None:
    turn = SENDKEY.parse(f"<action>{body}</action>")
    assert turn.arguments is None
    assert turn.error


def test_done_beats_any_action_in_the_same_answer_and_the_last_action_wins() -> None:
    two = "<action>type a</action> or rather <action>sendkey ret</action>"
    assert SENDKEY.parse(two).arguments == key("enter")
    for done in ("<done/>", "<done />", "<done>"):
        assert SENDKEY.parse(f"{two} {done}").arguments == DONE
    assert SENDKEY.parse("It cannot be done. <fail/>").arguments == FAIL


def test_a_tag_that_was_cut_types_nothing() -> None:
    assert "never closed" in (SENDKEY.parse("<action>type rm -rf /tm").error or "")
    assert "no <action>" in (SENDKEY.parse("I think.").error or "")


def test_a_newline_is_typed_as_enter() -> None:
    arguments = SENDKEY.parse_strict("<action>typeline dir</action>").arguments
    assert arguments is not None
    assert SENDKEY.to_command(arguments) == 'pyautogui.write("dir\\n")'


@pytest.mark.parametrize(
    ("body", "arguments", "command"),
    [
        ("click 10 20", CLICK, "pyautogui.click(10, 20)"),
        ("click (10, 20)", CLICK, "pyautogui.click(10, 20)"),
        ("rightclick 10 20", {**CLICK, "action": "right_click"}, "pyautogui.rightClick(10, 20)"),
        ("doubleclick 10,20", {**CLICK, "action": "double_click"}, "pyautogui.doubleClick(10, 20)"),
        ("move 10 20", {**CLICK, "action": "mouse_move"}, "pyautogui.moveTo(10, 20)"),
        (
            "drag 1 2 3 4",
            {"action": "left_click_drag", "start_coordinate": [1, 2], "end_coordinate": [3, 4]},
            "pyautogui.moveTo(1, 2)\npyautogui.dragTo(3, 4)",
        ),
        ("drag 3 4", {"action": "left_click_drag", "end_coordinate": [3, 4]}, "pyautogui.dragTo(3, 4)"),
        ("scroll down", {"action": "scroll", "direction": "down", "amount": 3}, "pyautogui.scroll(-3)"),
        (
            "scroll up 5 10 20",
            {"action": "scroll", "coordinate": [10, 20], "direction": "up", "amount": 5},
            "pyautogui.moveTo(10, 20)\npyautogui.scroll(5)",
        ),
    ],
)
def test_mouse_actions_are_an_addition_to_the_verbs(body: str, arguments: dict[str, Any], command: str) -> None:
    turn = SENDKEY.parse(f"<action>{body}</action>")
    assert turn.arguments == arguments
    assert SENDKEY.to_command(arguments) == command


@pytest.mark.parametrize("key", [*"ab1-/;", "ret", "spc", "f12", "meta_l-r", "ctrl-alt-delete", "alt-f4", "pgup"])
def test_every_key_of_the_example_is_a_key_of_the_emulated_keyboard(key: str) -> None:
    arguments = SENDKEY.parse_strict(f"<action>sendkey {key}</action>").arguments
    assert arguments is not None
    assert all(qcodes_of(name) for name in arguments["keys"])


def call(text: str) -> str:
    return f"<|think_start|>I look.<|think_end|><|action_start|>{text}<|action_end|>"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("click(100,100)", "pyautogui.click(100, 100)"),
        ("left_double(1, 2)", "pyautogui.doubleClick(1, 2)"),
        ("right_single(1,2)", "pyautogui.rightClick(1, 2)"),
        ("drag(1,2,3,4)", "pyautogui.moveTo(1, 2)\npyautogui.dragTo(3, 4)"),
        ("hotkey(ctrl, c)", 'pyautogui.hotkey("ctrl", "c")'),
        ("type(a, b (c) & d)", 'pyautogui.write("a, b (c) & d")'),
        ("scroll(1,2,up)", "pyautogui.moveTo(1, 2)\npyautogui.scroll(50)"),
        ("scroll(1,2,-3)", "pyautogui.moveTo(1, 2)\npyautogui.scroll(-3)"),
        ("move(1,2)", "pyautogui.moveTo(1, 2)"),
        ("press( )", 'pyautogui.press("space")'),
        ("wait()", "WAIT"),
        ("call_user()", "FAIL"),
        ("finish()", "DONE"),
        ("click(1,2)&type(x)&press(enter)", 'pyautogui.click(1, 2)\npyautogui.write("x")\npyautogui.press("enter")'),
        ("click(1,2) & wait() & press(enter)", 'pyautogui.click(1, 2)\ntime.sleep(2)\npyautogui.press("enter")'),
        ("click(1,2)&finish()", "pyautogui.click(1, 2)\nDONE"),
    ],
)
def test_each_call_becomes_its_command(text: str, command: str) -> None:
    turn = OSGYM.parse(call(text))
    assert turn.arguments is not None, turn.error
    assert OSGYM.to_command(turn.arguments) == command
    assert turn.description == "I look."


@pytest.mark.parametrize(
    "text",
    [
        *("click(1)", "click(1,2", "clack(1,2)", "click(1,2)&clack(3)", "click(1,2);click(3,4)", "click(2000,1)"),
        *(
            "wait(3)",
            "finish()&click(1,2)",
            "scroll(1,2,left)",
            "scroll(1,2,0)",
            "hotkey(ctrl,)",
            "press()",
            "type()",
            "",
        ),
    ],
)
def test_an_invalid_call_is_an_error_and_not_a_silent_wait(text: str) -> None:
    turn = OSGYM.parse(call(text))
    assert turn.arguments is None
    assert turn.error


def test_a_call_without_its_tags_is_read_and_one_that_was_cut_is_not() -> None:
    assert OSGYM.parse("<|think_start|>hm<|think_end|>click(10,20)<|im_end|>").arguments == CLICK
    assert OSGYM.parse("<|action_start|>click(10,20)").arguments == CLICK
    assert OSGYM.parse("<|action_start|>type(half a sen").error
