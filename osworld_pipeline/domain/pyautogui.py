"""The restricted pyautogui language: a sequence of known calls with literal arguments, parsed as a syntax tree and
never run. All commands from a model to a desktop pass through this module."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from osworld_pipeline.domain.python_text import parse_python
from osworld_pipeline.errors import ActionParseError

SPECIAL_ACTIONS = ("WAIT", "DONE", "FAIL")
"""OSWorld's actions other than calls."""

CALL_NAMES = frozenset({
    "click", "leftClick", "rightClick", "middleClick", "doubleClick", "tripleClick",
    "moveTo", "move", "moveRel", "dragTo", "drag", "dragRel", "mouseDown", "mouseUp",
    "scroll", "vscroll", "hscroll", "write", "typewrite", "press", "hotkey", "keyDown", "keyUp", "sleep",
})  # fmt: skip

MAX_TEXT_CHARS = 64 * 1024
MAX_CALLS = 256
MAX_SLEEP_S = 60.0
"""Limit for the sum of the sleeps of one action; a longer wait takes several actions."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One pyautogui call; `time.sleep(x)` is a Call named sleep. Arguments are literals: numbers, strings, booleans,
    None and tuples of them."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def parse_pyautogui(text: str) -> tuple[Call, ...]:
    """The calls of `text`, in order; several are on separate lines or joined by `;`. Imports of pyautogui and time are
    ignored.

    Raises:
        ActionParseError: anything other than known calls with literal arguments, or more of them than the limits
            permit.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise ActionParseError(f"the action has {len(text)} characters; at most {MAX_TEXT_CHARS} are read")
    calls: list[Call] = []
    for statement in _parse(text).body:
        if _is_tolerated_import(statement):
            continue
        if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
            raise ActionParseError(f"only pyautogui calls are actions, not: {_excerpt(statement)}")
        calls.append(_read_call(statement.value))
    if not calls:
        raise ActionParseError(f"there is no pyautogui call in the action {text.strip()[:80]!r}")
    if len(calls) > MAX_CALLS:
        raise ActionParseError(f"the action has {len(calls)} calls; at most {MAX_CALLS} are executed")
    _check_sleeps(calls)
    return tuple(calls)


def _parse(text: str) -> ast.Module:
    try:
        return parse_python("\n".join(line.strip() for line in text.strip().splitlines()))
    except ValueError as error:
        raise ActionParseError(f"the action {text.strip()[:80]!r} is not Python: {error}") from error


def _is_tolerated_import(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Import) and all(
        alias.name in ("pyautogui", "time") and alias.asname is None for alias in statement.names
    )


def _read_call(node: ast.Call) -> Call:
    function = node.func
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        raise ActionParseError(f"an action is a call of pyautogui.<name>, not: {_excerpt(node)}")
    owner, name = function.value.id, function.attr
    if not (owner == "pyautogui" and name in CALL_NAMES) and (owner, name) != ("time", "sleep"):
        raise ActionParseError(f"{owner}.{name} is not an action; known: pyautogui.{{{', '.join(sorted(CALL_NAMES))}}}")
    args = tuple(_literal(arg, name) for arg in node.args)
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ActionParseError(f"{name}: **arguments are not literals")
        kwargs[keyword.arg] = _literal(keyword.value, name)
    return Call(name=name, args=args, kwargs=kwargs)


def _literal(node: ast.expr, name: str, *, depth: int = 0) -> Any:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -_finite(value, name) if isinstance(node.op, ast.USub) else _finite(value, name)
    elif isinstance(node, ast.Constant):
        if node.value is None or isinstance(node.value, str | bool):
            return node.value
        if isinstance(node.value, int | float):
            return _finite(node.value, name)
    elif isinstance(node, ast.List | ast.Tuple) and depth == 0:
        return tuple(_literal(item, name, depth=1) for item in node.elts)
    raise ActionParseError(f"{name}: an argument must be a literal number, string or list, not: {_excerpt(node)}")


def _finite(value: int | float, name: str) -> int | float:
    # False for NaN. An integer may have any length, so it is compared and not converted.
    if not abs(value) <= 1e9:
        raise ActionParseError(f"{name}: a number is out of range")
    return value


def _check_sleeps(calls: list[Call]) -> None:
    total_s = 0.0
    for call in calls:
        if call.name != "sleep":
            continue
        values = [*call.args, *call.kwargs.values()]
        if len(values) != 1 or isinstance(values[0], bool) or not isinstance(values[0], int | float) or values[0] < 0:
            raise ActionParseError("sleep needs one number of seconds, 0 or more")
        total_s += values[0]
    if total_s > MAX_SLEEP_S:
        raise ActionParseError(f"the action sleeps {total_s:g} s; at most {MAX_SLEEP_S:g} s are allowed")


def _excerpt(node: ast.AST) -> str:
    try:
        return ast.unparse(node)[:80]
    except (RecursionError, ValueError):
        return type(node).__name__
