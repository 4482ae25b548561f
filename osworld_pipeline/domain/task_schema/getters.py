"""Getters: the state that an evaluator reads (`evaluator.result`, `evaluator.expected`)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from osworld_pipeline.domain.task_schema.spec import Getter, Key, State

_COMMAND_KEYS = (
    Key(name="command", kind="text or list of texts", about="a program with its arguments, or a line for a shell",
        is_required=True),
    Key(name="shell", kind="true or false", about="whether a shell runs it; default: false"),
)  # fmt: skip


def _getter(
    name: str, gives: State, about: str, keys: tuple[Key, ...] = (), example: Mapping[str, Any] | None = None
) -> Getter:
    return Getter(name=name, gives=gives, about=about, keys=keys, example={"type": name, **(example or {})})


_ALL = (
    _getter("accessibility_tree", "text", "The desktop's accessibility tree, as XML."),
    _getter(
        "cache_file", "file", "Output that a set-up verb stored under a name (`stdout` and `stderr` of `execute`).",
        (Key(name="path", about="that name", is_required=True),), {"path": "windows.txt"},
    ),
    _getter(
        "list_directory", "tree", "A folder with everything below it; nothing if it is missing.",
        (Key(name="path", about="the folder in the desktop", is_required=True),), {"path": "/home/user/photos"},
    ),
    _getter(
        "rule", "rules", "The metric's rules, from the task itself.",
        (Key(name="rules", kind="anything", about="the rules of the metric", is_required=True,
             may_be_empty=True),),
        {"rules": {"expected": "milk\n"}},
    ),
    _getter(
        "vm_command_error", "text", "A command's error output; nothing if it could not be started.", _COMMAND_KEYS,
        {"command": ["python3", "-c", "import numpy"]},
    ),
    _getter(
        "vm_command_line", "text", "A command's output; nothing if it could not be started.", _COMMAND_KEYS,
        {"command": "cat notes/todo.txt", "shell": True},
    ),
    _getter(
        "vm_file", "file", "A file of the desktop; nothing if it is missing.",
        (
            Key(name="path", kind="text or list of texts", about="the file in the desktop", is_required=True),
            Key(name="dest", kind="text or list of texts", about="a name for the fetched file", is_required=True),
            Key(name="multi", kind="true or false", about="whether `path` and `dest` are lists"),
            Key(name="gives", kind="list of whole numbers",
                about="with `multi`: which of the files the metric gets, from 0; default: the first"),
            Key(name="time_suffix", kind="true or false", about="whether the time is added to `dest`"),
            Key(name="time_format", about="format of that time, as in `strftime`"),
        ),
        {"path": "/home/user/notes/todo.txt", "dest": "todo.txt"},
    ),
    _getter("vm_screen_size", "size", "Width and height of the screen in pixels."),
    _getter("vm_terminal_output", "text", "The text of the terminal; nothing if there is none."),
    _getter(
        "vm_wallpaper", "file", "The desktop background; empty if there is none.",
        (Key(name="dest", about="a name for the fetched file", is_required=True),), {"dest": "wallpaper.png"},
    ),
    _getter(
        "vm_window_size", "size", "Width and height of a window in pixels; nothing if it is missing.",
        (Key(name="app_class_name", about="the class of its program", is_required=True),), {"app_class_name": "xterm"},
    ),
)  # fmt: skip
GETTERS: Mapping[str, Getter] = MappingProxyType({getter.name: getter for getter in _ALL})
