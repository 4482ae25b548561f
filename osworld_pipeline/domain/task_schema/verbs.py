"""Set-up verbs: they prepare a fresh desktop (`config`), and run before grading (`evaluator.postconfig`)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from osworld_pipeline.domain.task_schema.spec import Key, Verb

_COMMAND = Key(
    name="command", kind="text or list of texts", about="a program with its arguments, or a line for a shell",
    is_required=True,
)  # fmt: skip
_SHELL = Key(name="shell", kind="true or false", about="whether a shell runs it; default: false")
_RUN_KEYS = (
    _COMMAND,
    _SHELL,
    Key(name="stdout", about="the name under which the getter `cache_file` finds its output"),
    Key(name="stderr", about="the same for its error output"),
    Key(
        name="until", kind="object",
        about="repeat it, for up to 60 s, until its `returncode`, `stdout` or `stderr` equals or contains this",
    ),
)  # fmt: skip
_WINDOW_KEYS = (
    Key(name="window_name", about="a part of its title", is_required=True),
    Key(name="strict", kind="true or false", about="whether the whole title must match"),
    Key(name="by_class", kind="true or false", about="whether it is the name of the window's class"),
)


def _verb(name: str, about: str, keys: tuple[Key, ...], example: Mapping[str, Any]) -> Verb:
    return Verb(name=name, about=about, keys=keys, example={"type": name, "parameters": example})


_ALL = (
    _verb(
        "activate_window", "Brings a window to the front. A missing window is ignored.", _WINDOW_KEYS,
        {"window_name": "Terminal"},
    ),
    _verb(
        "change_wallpaper", "Sets the desktop background.",
        (Key(name="path", about="a picture in the desktop", is_required=True),), {"path": "/home/user/hills.png"},
    ),
    _verb(
        "chrome_close_tabs", "Closes tabs of the browser.",
        (Key(name="urls_to_close", kind="list of texts", about="an address for each tab", is_required=True,
             may_be_empty=True),),
        {"urls_to_close": ["https://www.example.com"]},
    ),
    _verb(
        "chrome_open_tabs", "Opens tabs in a running browser, and closes the initial one.",
        (Key(name="urls_to_open", kind="list of texts", about="an address for each tab", is_required=True,
             may_be_empty=True),),
        {"urls_to_open": ["https://www.example.com"]},
    ),
    _verb(
        "close_window", "Closes a window. A missing window is ignored.", _WINDOW_KEYS,
        {"window_name": "Terminal"},
    ),
    _verb("command", "Another name of `execute`.", _RUN_KEYS, {"command": ["mkdir", "-p", "/home/user/notes"]}),
    _verb(
        "download", "Downloads files from the web into the desktop, from hosts that the env server allows.",
        (Key(name="files", kind="list of files with url and path", about="`path` is that in the desktop",
             is_required=True, may_be_empty=True),),
        {"files": [{"url": "https://www.example.com/table.csv", "path": "/home/user/table.csv"}]},
    ),
    _verb(
        "execute", "Runs a command until it exits; failures are ignored.", _RUN_KEYS,
        {"command": "mkdir -p notes && echo milk > notes/todo.txt", "shell": True},
    ),
    _verb("launch", "Starts a program and lets it run.", (_COMMAND, _SHELL), {"command": ["xterm", "-maximized"]}),
    _verb(
        "open", "Opens a file in the program for its kind.",
        (Key(name="path", about="the file in the desktop", is_required=True),), {"path": "/home/user/todo.txt"},
    ),
    _verb(
        "sleep", "Waits; up to the env server's limit, 60 s by default.",
        (Key(name="seconds", kind="number from 0", about="how long", is_required=True),), {"seconds": 1},
    ),
    _verb(
        "upload_file", "Puts files into the desktop.",
        (Key(name="files", kind="list of files with path and content, content_base64 or local_path",
             about="`path` is that in the desktop; `local_path` is below the env server's upload folder",
             is_required=True, may_be_empty=True),),
        {"files": [{"path": "/home/user/todo.txt", "content": "milk\n"}]},
    ),
)  # fmt: skip
VERBS: Mapping[str, Verb] = MappingProxyType({verb.name: verb for verb in _ALL})
