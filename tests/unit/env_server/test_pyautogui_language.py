"""The restricted pyautogui language: known calls with literals pass, everything else is refused and never run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.driving.pyautogui_calls import read_calls
from env_server.guest import calls as guest_calls
from osworld_pipeline.domain.pyautogui import CALL_NAMES, Call, parse_pyautogui
from osworld_pipeline.errors import ActionParseError

literals = st.one_of(
    st.integers(-10_000, 10_000), st.floats(-1e6, 1e6), st.text(max_size=30), st.booleans(), st.none(),
    st.lists(st.text(max_size=5), max_size=3).map(tuple),
)  # fmt: skip
names = st.sampled_from(sorted(CALL_NAMES - {"sleep"}))
keywords = st.dictionaries(st.sampled_from(["x", "y", "button", "interval"]), literals, max_size=2)


@given(st.lists(st.tuples(names, st.lists(literals, max_size=3), keywords), min_size=1, max_size=4), st.booleans())
def test_calls_written_out_are_read_back_the_same(
    written: list[tuple[str, list[object], dict[str, object]]], is_joined_by_semicolon: bool
) -> None:
    calls = tuple(Call(name=name, args=tuple(args), kwargs=kwargs) for name, args, kwargs in written)
    texts = [
        f"pyautogui.{call.name}({', '.join([*map(repr, call.args), *(f'{k}={v!r}' for k, v in call.kwargs.items())])})"
        for call in calls
    ]
    assert parse_pyautogui("; ".join(texts) if is_joined_by_semicolon else "\n".join(texts)) == calls


@given(st.text(max_size=200))
def test_any_text_is_calls_or_a_parse_error(text: str) -> None:
    try:
        calls = parse_pyautogui(text)
    except ActionParseError:
        return
    assert all(call.name in CALL_NAMES for call in calls)


@given(st.text(alphabet="pyautogi.click(1,)=[]'\"-+*;\n_ x{}:", max_size=120))
def test_text_near_the_grammar_is_calls_or_a_parse_error(text: str) -> None:
    try:
        assert parse_pyautogui(f"pyautogui.click({text})")
    except ActionParseError:
        return


@pytest.mark.parametrize(
    "text",
    [
        "pyautogui.click(__import__('os').getpid(), 1)",
        "pyautogui.write(open('/etc/passwd').read())",
        "pyautogui.click(*[1, 2])",
        "pyautogui.click(**{'x': 1})",
        "pyautogui.click(1 + 1)",
        "pyautogui.click(x)",
        "pyautogui.write(f'{1}')",
        "pyautogui.write(b'a')",
        "pyautogui.click(1j)",
        "pyautogui.click(1e999)",
        "pyautogui.click(...)",
        "pyautogui.click(lambda: 1)",
        "pyautogui.hotkey([['ctrl']])",
        "pyautogui.click.__call__(1)",
        "pyautogui.__class__()",
        "pyautogui.alert('hello')",
        "pyautogui.screenshot('a.png')",
        "os.system('true')",
        "time.time()",
        "time.sleep(-1)",
        "time.sleep(True)",
        "time.sleep(61)",
        "time.sleep(40); pyautogui.sleep(40)",
        "import os",
        "import pyautogui as os",
        "from pyautogui import click",
        "import pyautogui",
        "x = pyautogui.click(1)",
        "pyautogui.click(1) or pyautogui.click(2)",
        "[pyautogui.click(i) for i in (1, 2)]",
        "if True:\n    pyautogui.click(1)",
        "pyautogui.click(1",
        "pyautogui",
        "click(1, 2)",
        "WAIT",
        "",
        "\0",
        "(" * 5000,
        "-" * 5000 + "1",
        "pyautogui.click(" + "[" * 150 + "]" * 150 + ")",
        "pyautogui.press('a');" * 300,
        "pyautogui.write('" + "a" * 70_000 + "')",
    ],
)
def test_text_outside_the_language_is_refused(text: str) -> None:
    with pytest.raises(ActionParseError):
        parse_pyautogui(text)


def test_several_calls_imports_and_sleeps_are_read_in_order() -> None:
    text = """import pyautogui, time
        pyautogui.click(10, -20.5, button='right')
        time.sleep(0.5); pyautogui.hotkey('ctrl', 'c')
    """
    assert parse_pyautogui(text) == (
        Call(name="click", args=(10, -20.5), kwargs={"button": "right"}),
        Call(name="sleep", args=(0.5,)),
        Call(name="hotkey", args=("ctrl", "c")),
    )


def test_backslashes_and_unicode_in_a_string_are_kept() -> None:
    (call,) = parse_pyautogui(r'pyautogui.write("C:\dir \"ü\" 漢 \n")')
    assert call.args == ('C:\\dir "ü" 漢 \n',)


def test_list_arguments_become_tuples() -> None:
    assert parse_pyautogui("pyautogui.press(['a', 'b'])") == (Call(name="press", args=(("a", "b"),)),)


def test_language_and_guest_have_the_same_calls() -> None:
    assert frozenset(guest_calls.CALL_NAMES) == CALL_NAMES


@pytest.mark.parametrize(
    "text",
    [
        "pyautogui.press('a', presses=1000, interval=1)",
        "pyautogui.write('" + "a" * 200 + "', interval=1)",
        "pyautogui.click(1, 1, 100, 1)",
        "pyautogui.moveTo(1, 1, 50); pyautogui.moveTo(2, 2, duration=50)",
        "pyautogui.press('nosuchkey')",
        "pyautogui.click(1, 2, colour='red')",
        "pyautogui.moveTo()",
        "pyautogui.write(5)",
    ],
)
def test_action_that_lasts_too_long_or_has_wrong_arguments_is_refused(text: str) -> None:
    with pytest.raises(ActionParseError):
        read_calls(text)


def test_actions_within_the_limits_pass() -> None:
    text = "pyautogui.write('hello', interval=0.05); pyautogui.moveTo(5, 5, duration=1); pyautogui.scroll(-3)"
    assert [call.name for call in read_calls(text)] == ["write", "moveTo", "scroll"]


def test_parsing_never_runs_anything(tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("target") / "ran"
    with pytest.raises(ActionParseError):
        parse_pyautogui(f"pyautogui.write(open({str(target)!r}, 'w').write('x'))")
    assert not target.exists()
