"""Getters: what an evaluator looks at (`evaluator.result`, `evaluator.expected`)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from osworld_pipeline.domain.task_schema.spec import Getter, Key, State

_COMMAND_KEYS = (
    Key(name="command", kind="text or list of texts", about="a program with its arguments, or a line for a shell",
        is_required=True),
    Key(name="shell", kind="true or false", about="whether a shell reads it; false where it is left out"),
)  # fmt: skip


def _getter(
    name: str, gives: State, about: str, keys: tuple[Key, ...] = (), example: Mapping[str, Any] | None = None
) -> Getter:
    return Getter(name=name, gives=gives, about=about, keys=keys, example={"type": name, **(example or {})})


_ALL = (
    _getter("accessibility_tree", "text", "The desktop's accessibility tree, as XML."),
    _getter(
        "cache_file", "file", "What a set-up verb kept under a name (`stdout` and `stderr` of `execute`).",
        (Key(name="path", about="that name", is_required=True),), {"path": "windows.txt"},
    ),
    _getter(
        "list_directory", "tree", "A folder with everything below it; nothing where it is missing.",
        (Key(name="path", about="the folder in the desktop", is_required=True),), {"path": "/home/user/photos"},
    ),
    _getter(
        "rule", "rules", "What the task itself says: the metric's rules.",
        (Key(name="rules", kind="anything", about="the metric's own list of them", is_required=True,
             may_be_empty=True),),
        {"rules": {"expected": "milk\n"}},
    ),
    _getter(
        "vm_command_error", "text", "A command's error output; nothing where it could not be started.", _COMMAND_KEYS,
        {"command": ["python3", "-c", "import numpy"]},
    ),
    _getter(
        "vm_command_line", "text", "A command's output; nothing where it could not be started.", _COMMAND_KEYS,
        {"command": "cat notes/todo.txt", "shell": True},
    ),
    _getter(
        "vm_file", "file", "A file of the desktop; nothing where it is missing.",
        (
            Key(name="path", kind="text or list of texts", about="the file in the desktop", is_required=True),
            Key(name="dest", kind="text or list of texts", about="a name for the fetched file", is_required=True),
            Key(name="multi", kind="true or false", about="whether `path` and `dest` are lists"),
            Key(name="gives", kind="list of whole numbers",
                about="with `multi`: which of the files the metric gets, from 0; the first where it is left out"),
            Key(name="time_suffix", kind="true or false", about="whether the time is added to `dest`"),
            Key(name="time_format", about="that time's form, as `strftime` has it"),
        ),
        {"path": "/home/user/notes/todo.txt", "dest": "todo.txt"},
    ),
    _getter("vm_screen_size", "size", "Width and height of the screen in pixels."),
    _getter("vm_terminal_output", "text", "What the terminal shows; nothing where there is none."),
    _getter(
        "vm_wallpaper", "file", "The picture behind the icons; empty where there is none.",
        (Key(name="dest", about="a name for the fetched file", is_required=True),), {"dest": "wallpaper.png"},
    ),
    _getter(
        "vm_window_size", "size", "Width and height of a window in pixels; nothing where it is missing.",
        (Key(name="app_class_name", about="the class of its program", is_required=True),), {"app_class_name": "xterm"},
    ),
)  # fmt: skip
GETTERS: Mapping[str, Getter] = MappingProxyType({getter.name: getter for getter in _ALL})
