"""Set-up verbs: what prepares a fresh desktop (`config`), and what is done before grading (`evaluator.postconfig`)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from osworld_pipeline.domain.task_schema.spec import Key, Verb

_COMMAND = Key(
    name="command", kind="text or list of texts", about="a program with its arguments, or a line for a shell",
    is_required=True,
)  # fmt: skip
_SHELL = Key(name="shell", kind="true or false", about="whether a shell reads it; false where it is left out")
_RUN_KEYS = (
    _COMMAND,
    _SHELL,
    Key(name="stdout", about="the name under which the getter `cache_file` finds its output"),
    Key(name="stderr", about="the same for its error output"),
    Key(
        name="until", kind="object",
        about="repeat it, for up to 60 s, until its `returncode`, `stdout` or `stderr` is or holds this",
    ),
)  # fmt: skip
_WINDOW_KEYS = (
    Key(name="window_name", about="a part of its title", is_required=True),
    Key(name="strict", kind="true or false", about="whether the whole title has to be that"),
    Key(name="by_class", kind="true or false", about="whether the name is that of the window's class"),
)


def _verb(name: str, about: str, keys: tuple[Key, ...], example: Mapping[str, Any]) -> Verb:
    return Verb(name=name, about=about, keys=keys, example={"type": name, "parameters": example})


_ALL = (
    _verb(
        "activate_window", "Brings a window to the front. One that is not there is passed over.", _WINDOW_KEYS,
        {"window_name": "Terminal"},
    ),
    _verb(
        "change_wallpaper", "Sets the picture behind the icons.",
        (Key(name="path", about="a picture in the desktop", is_required=True),), {"path": "/home/user/hills.png"},
    ),
    _verb(
        "chrome_close_tabs", "Closes tabs of the browser.",
        (Key(name="urls_to_close", kind="list of texts", about="an address for each tab", is_required=True,
             may_be_empty=True),),
        {"urls_to_close": ["https://www.example.com"]},
    ),
    _verb(
        "chrome_open_tabs", "Opens tabs in a browser that runs, and closes the one it began with.",
        (Key(name="urls_to_open", kind="list of texts", about="an address for each tab", is_required=True,
             may_be_empty=True),),
        {"urls_to_open": ["https://www.example.com"]},
    ),
    _verb(
        "close_window", "Closes a window. One that is not there is passed over.", _WINDOW_KEYS,
        {"window_name": "Terminal"},
    ),
    _verb("command", "Another name of `execute`.", _RUN_KEYS, {"command": ["mkdir", "-p", "/home/user/notes"]}),
    _verb(
        "download", "Fetches files from the web into the desktop; from hosts that the env server allows.",
        (Key(name="files", kind="list of files with url and path", about="`path` is that in the desktop",
             is_required=True, may_be_empty=True),),
        {"files": [{"url": "https://www.example.com/table.csv", "path": "/home/user/table.csv"}]},
    ),
    _verb(
        "execute", "Runs a command to its end; whether it succeeded does not matter.", _RUN_KEYS,
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
             about="`path` is that in the desktop; `local_path` lies below the env server's upload folder",
             is_required=True, may_be_empty=True),),
        {"files": [{"path": "/home/user/todo.txt", "content": "milk\n"}]},
    ),
)  # fmt: skip
VERBS: Mapping[str, Verb] = MappingProxyType({verb.name: verb for verb in _ALL})
