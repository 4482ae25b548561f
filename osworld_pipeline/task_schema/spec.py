"""Declarations of verbs, getters and metrics. One function is the whole declaration:

    @getter("size", example={"app_class_name": "xterm"})
    async def vm_window_size(guest: Guest, cache: Cache, *, app_class_name: Annotated[str, Key("its class")]) -> ...:
        '''Width and height of a window in pixels; nothing if it is missing.'''

The task writes the function's name and its keyword parameters; one without a default is required. The first paragraph
of the docstring is its text in docs/evaluators.md.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

State = Literal["text", "file", "size", "tree", "rules", "anything"]
"""The output of a getter and the input of a metric."""
Failure = Literal["is an error", "is ignored", "is ignored before grading"]
_KINDS_OF_TYPES: Mapping[Any, str] = {str: "text", bool: "true or false", Sequence[str]: "list of texts"}


@dataclass(frozen=True)
class Key:
    """A parameter of a verb or a getter, or an option of a metric."""

    about: str
    kind: str = ""
    """One of KINDS; by default that of the parameter's type."""
    may_be_empty: bool = field(default=False, kw_only=True)
    name: str = field(default="", kw_only=True)
    is_required: bool = field(default=False, kw_only=True)

    def fault_of(self, value: Any) -> str | None:
        """The problem of a value, as the end of a sentence; None for a valid one."""
        if value in ("", [], {}):
            return "is empty" if self.is_required and not self.may_be_empty else None
        return None if KINDS[self.kind](value) else f"is invalid; expected: {self.kind}"


class Rule(Key):
    """A parameter of a metric that the task writes among its rules."""


Command = Annotated[
    str | Sequence[str], Key("a program with its arguments, or a line for a shell", "text or list of texts")
]
Shell = Annotated[bool, Key("whether a shell runs it; default: false")]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A verb, a getter or a metric."""

    name: str
    about: str
    keys: tuple[Key, ...]
    """The keyword parameters of the function."""
    function: Callable[..., Any]
    example: Mapping[str, Any]
    """What a task writes."""

    def __call__(self, *arguments: Any, **keys: Any) -> Any:
        return self.function(*arguments, **keys)


@dataclass(frozen=True, kw_only=True)
class Verb(Part):
    """Called with a SetupContext and the task's `parameters`."""

    opens_window: bool
    """Whether it usually opens a window."""
    failure: Failure


@dataclass(frozen=True, kw_only=True)
class Getter(Part):
    """Called with a Guest, a Cache and the task's keys besides `type`."""

    gives: State


@dataclass(frozen=True, kw_only=True)
class Metric(Part):
    """Called with what the getters of `result` and `expected` return, and the task's `options`. The function takes
    rules as keyword parameters."""

    result: State
    expected: State | None
    """None: it has no `expected`."""

    @property
    def rules(self) -> tuple[Key, ...]:
        return tuple(key for key in self.keys if isinstance(key, Rule))

    @property
    def options(self) -> tuple[Key, ...]:
        return tuple(key for key in self.keys if not isinstance(key, Rule))

    @property
    def needs_a_rule(self) -> bool:
        """Its rules are optional, and every desktop fulfils it without one."""
        return bool(self.rules) and not any(rule.is_required for rule in self.rules)

    def __call__(self, *found: Any, **options: Any) -> float:
        sides = list(zip((self.result, self.expected), found, strict=False))
        rules = next((value for state, value in sides if state == "rules"), {})
        return self.function(*(value for state, value in sides if state != "rules"), **rules, **options)


def verb(
    *, example: Mapping[str, Any], name: str = "", opens_window: bool = False, failure: Failure = "is an error"
) -> Callable[[Callable[..., Awaitable[None]]], Verb]:
    """`example` has the parameters. `name`: the verb's name, if a function of that name would shadow a builtin."""

    def declare(function: Callable[..., Awaitable[None]]) -> Verb:
        whole = {"type": name or function.__name__, "parameters": example}
        return Verb(**_facts(function, name), example=whole, opens_window=opens_window, failure=failure)

    return declare


def getter(gives: State, *, example: Mapping[str, Any] | None = None) -> Callable[[Callable[..., Any]], Getter]:
    """`example` has the keys besides `type`."""
    return lambda function: Getter(
        **_facts(function), example={"type": function.__name__, **(example or {})}, gives=gives
    )


def metric(
    result: State, expected: State | None, *, example: Sequence[Mapping[str, Any]]
) -> Callable[[Callable[..., float]], Metric]:
    """`example` has `result`, `expected` and `options`; of a side that reads rules, only the rules."""

    def declare(function: Callable[..., float]) -> Metric:
        whole: dict[str, Any] = {"func": function.__name__}
        for side, state, value in zip(
            ("result", "expected", "options"), (result, expected, None), example, strict=False
        ):
            whole[side] = {"type": "rule", "rules": value} if state == "rules" else value
        return Metric(**_facts(function), example=whole, result=result, expected=expected)

    return declare


P = TypeVar("P", bound=Part)


def collect(kind: type[P], *modules: Mapping[str, object]) -> Mapping[str, P]:
    """All parts of a kind in the variables of modules, by name."""
    parts = [part for variables in modules for part in variables.values() if isinstance(part, kind)]
    found = {part.name: part for part in sorted(parts, key=lambda part: part.name)}
    assert len(found) == len(parts), f"two of {sorted(part.name for part in parts)} have one name"
    return MappingProxyType(found)


def _facts(function: Callable[..., Any], name: str = "") -> dict[str, Any]:
    """What the function itself declares."""
    keys = []
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY:
            (key,), is_required = one.annotation.__metadata__, one.default is one.empty
            kind = key.kind or _KINDS_OF_TYPES[one.annotation.__origin__]
            keys.append(replace(key, name=one.name, kind=kind, is_required=is_required))
    about = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return {"name": name or function.__name__, "about": about, "keys": tuple(keys), "function": function}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_text(item) for item in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_whole_number(value: Any) -> bool:
    return (
        isinstance(value, int | str) and not isinstance(value, bool) and re.fullmatch(r"[0-9]+", str(value)) is not None
    )


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) and item for item in value)


def _is_patterns(value: Any) -> bool:
    if not _is_texts(value):
        return False
    try:
        return all(re.compile(pattern) for pattern in value)
    except (re.error, OverflowError, RecursionError):
        return False


def _is_comparisons(value: Any) -> bool:
    return _is_objects(value) and all(
        isinstance(item.get("key"), list) and isinstance(item.get("method"), str) and "ref" in item for item in value
    )


def _is_files(value: Any, *sources: str) -> bool:
    """Files to put into the desktop, each from one of the `sources`."""
    return _is_objects(value) and all(
        _is_text(file.get("path")) and any(isinstance(file.get(source), str) for source in sources) for file in value
    )


KINDS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "anything": lambda _: True,
        "text": _is_text,
        "list of texts": _is_texts,
        "text or list of texts": lambda value: _is_text(value) or _is_texts(value),
        # OSWorld's own tasks also write "true".
        "true or false": lambda value: isinstance(value, bool) or value == "true",
        "number from 0": _is_number,
        "whole number": _is_whole_number,
        "list of whole numbers": lambda value: isinstance(value, list) and all(map(_is_whole_number, value)),
        "object": _is_object,
        "list": lambda value: isinstance(value, list),
        "list of objects": _is_objects,
        "list of regular expressions": _is_patterns,
        "list of objects with key (a list), method and ref": _is_comparisons,
        "list of files with url and path": lambda value: _is_files(value, "url"),
        "list of files with path and content, content_base64 or local_path": lambda value: _is_files(
            value, "content", "content_base64", "local_path"
        ),
        "`str` or `list`": lambda value: value in ("str", "list"),
    }
)
