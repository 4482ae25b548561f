"""Python's parser on foreign text: invalid text gives one error and valid Python none, also in several threads."""

import ast
import gc
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from osworld_pipeline.domain.python_text import parse_python

TEXT = "pyautogui.click(1, [1, 2, [3, [4]]], x={'a': (1, 2)})"


def test_a_text_is_parsed_to_the_tree_that_ast_gives() -> None:
    assert ast.dump(parse_python(TEXT)) == ast.dump(ast.parse(TEXT))
    assert ast.dump(parse_python("f(1)", "eval")) == ast.dump(ast.parse("f(1)", mode="eval"))


@pytest.mark.parametrize("text", ["f(", "a b", "\0", "(" * 5_000, "'\ud800'", "9" * 5_000, " x"])
def test_text_that_is_not_python_gives_one_error_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match=r"[a-z]"):
        parse_python(text)


def test_a_backslash_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse_python(r"write('C:\dir')")


def test_a_failure_of_the_parser_is_retried_and_finally_raised_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [SystemError("AST constructor recursion depth mismatch")] * 3
    parse = ast.parse

    def flaky(text: str, **options: Any) -> ast.AST:
        if failures:
            raise failures.pop()
        return parse(text, **options)

    monkeypatch.setattr(ast, "parse", flaky)
    assert isinstance(parse_python(TEXT), ast.Module)
    failures = [SystemError("mismatch")] * 1_000
    with pytest.raises(ValueError, match="parser failed 20 times"):
        parse_python(TEXT)


@pytest.fixture
def busy_collector() -> Iterator[None]:
    """Makes the garbage collector run often."""
    before = gc.get_threshold()
    gc.set_threshold(10)
    yield
    gc.set_threshold(*before)


class Cyclic:
    """An object that releases the interpreter to another thread while it is collected."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0.0001)


@pytest.mark.usefixtures("busy_collector")
def test_threads_that_parse_at_once_all_get_their_tree() -> None:
    failures: list[BaseException] = []
    end = time.monotonic() + 3

    def work() -> None:
        while time.monotonic() < end:
            Cyclic()
            try:
                parse_python(TEXT)
            except (SystemError, ValueError) as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
