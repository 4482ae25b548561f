"""Getters: each reads one part of the state of a desktop or of the task (`evaluator.result`, `evaluator.expected`).
None means that it does not exist; an exception is a fault of the grader."""

import os.path
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from osworld_pipeline.errors import TamperingError
from osworld_pipeline.task_schema.context import Cache, CommandResult, Guest, ResultFile
from osworld_pipeline.task_schema.spec import Command, Getter, Key, Shell, collect, getter

COMMAND_TIMEOUT_S = 60.0


@getter("rules", example={"rules": {"expected": "milk\n"}})
async def rule(
    guest: Guest,
    cache: Cache,
    *,
    rules: Annotated[Any, Key("the rules of the metric", "anything", may_be_empty=True)],
) -> Any:
    """The metric's rules, from the task itself."""
    return rules


@getter("text", example={"command": "cat notes/todo.txt", "shell": True})
async def vm_command_line(guest: Guest, cache: Cache, *, command: Command, shell: Shell = False) -> str | None:
    """A command's output; nothing if it could not be started or did not end in time."""
    result = await _run(guest, command, shell)
    return result.output if result.status == "success" else None


@getter("text", example={"command": ["python3", "-c", "import numpy"]})
async def vm_command_error(guest: Guest, cache: Cache, *, command: Command, shell: Shell = False) -> str | None:
    """A command's error output; nothing if it could not be started or did not end in time."""
    result = await _run(guest, command, shell)
    return result.error if result.status == "success" else None


async def _run(guest: Guest, command: str | Sequence[str], shell: bool) -> CommandResult:
    """Raises TamperingError if it was killed: in a running desktop only the desktop's own programs can do that."""
    result = await guest.execute(command, shell=shell, timeout_s=COMMAND_TIMEOUT_S, is_graders=True)
    if result.was_killed:
        raise TamperingError(f"the grader's command {str(command)[:120]!r} was killed in its desktop")
    return result


@getter("text")
async def vm_terminal_output(guest: Guest, cache: Cache) -> str | None:
    """The text of the terminal; nothing if there is none."""
    return await guest.terminal()


@getter("text")
async def accessibility_tree(guest: Guest, cache: Cache) -> str:
    """The desktop's accessibility tree, as XML."""
    return await guest.accessibility()


@getter("size")
async def vm_screen_size(guest: Guest, cache: Cache) -> dict[str, int]:
    """Width and height of the screen in pixels."""
    width, height = await guest.screen_size()
    return {"width": width, "height": height}


@getter("size", example={"app_class_name": "xterm"})
async def vm_window_size(
    guest: Guest, cache: Cache, *, app_class_name: Annotated[str, Key("the class of its program")]
) -> dict[str, int] | None:
    """Width and height of a window in pixels; nothing if it is missing."""
    size = await guest.window_size(app_class_name)
    return None if size is None else {"width": size[0], "height": size[1]}


@getter("file", example={"dest": "wallpaper.png"})
async def vm_wallpaper(
    guest: Guest, cache: Cache, *, dest: Annotated[str, Key("a name for the fetched file")]
) -> ResultFile:
    """The desktop background; empty if there is none."""
    file = await cache.fetch(dest, lambda max_bytes: guest.wallpaper(max_bytes=max_bytes))
    return file or ResultFile(name=dest, data=b"")


@getter("tree", example={"path": "/home/user/photos"})
async def list_directory(
    guest: Guest, cache: Cache, *, path: Annotated[str, Key("the folder in the desktop")]
) -> dict[str, Any] | None:
    """A folder with everything below it; nothing if it is missing."""
    return await guest.list_directory(path)


@getter("file", example={"path": "windows.txt"})
async def cache_file(guest: Guest, cache: Cache, *, path: Annotated[str, Key("that name")]) -> ResultFile:
    """Output that a set-up verb stored under a name (`stdout` and `stderr` of `execute`).

    KeyError if no verb did: the task file is wrong."""
    file = cache.get(path)
    if file is None:
        raise KeyError(f"no set-up verb stored a file named {path!r}")
    return file


@getter("file", example={"path": "/home/user/notes/todo.txt", "dest": "todo.txt"})
async def vm_file(
    guest: Guest,
    cache: Cache,
    *,
    path: Annotated[Any, Key("the file in the desktop", "text or list of texts")],
    dest: Annotated[Any, Key("a name for the fetched file", "text or list of texts")],
    multi: Annotated[bool, Key("whether `path` and `dest` are lists")] = False,
    gives: Annotated[
        Sequence[int],
        Key("with `multi`: which of the files the metric gets, from 0; default: the first", "list of whole numbers"),
    ] = (0,),
    time_suffix: Annotated[bool, Key("whether the time is added to `dest`")] = False,
    time_format: Annotated[str, Key("format of that time, as in `strftime`")] = "%Y%m%d_%H%M%S",
) -> ResultFile | list[ResultFile | None] | None:
    """A file of the desktop; nothing if it is missing."""

    async def fetch(path: Any, dest: Any) -> ResultFile | None:
        return await cache.fetch(dest, lambda max_bytes: guest.file(path, max_bytes=max_bytes))

    if not multi:
        if time_suffix:
            stem, ending = os.path.splitext(dest)
            dest = f"{stem}_{time.strftime(time_format)}{ending}"
        return await fetch(path, dest)
    files = []
    for index, pair in enumerate(zip(path, dest, strict=True)):
        file = await fetch(*pair)
        if index in gives:
            files.append(file)
    return files[0] if len(files) == 1 else files


GETTERS: Mapping[str, Getter] = collect(Getter, globals())
