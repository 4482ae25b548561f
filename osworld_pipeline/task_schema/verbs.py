"""OSWorld's set-up verbs: they prepare a fresh desktop (`config`), and run before grading (`evaluator.postconfig`)."""

import binascii
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from osworld_pipeline.errors import SetupError
from osworld_pipeline.task_schema.context import CommandResult, SetupContext
from osworld_pipeline.task_schema.spec import Command, Key, Shell, Verb, collect, verb

UNTIL_TIMEOUT_S = 60.0
UNTIL_INTERVAL_S = 0.3
UNTIL_MAX_FAILURES = 5
CLIENT_PASSWORD = "password"  # noqa: S105 - OSWorld's public password of its guest user

WindowName = Annotated[str, Key("a part of its title")]
IsStrict = Annotated[bool, Key("whether the whole title must match")]
ByClass = Annotated[bool, Key("whether it is the name of the window's class")]
Until = Annotated[
    Mapping[str, Any] | None,
    Key(
        "repeat the command, for up to 60 s, until one of these holds: `returncode` is its exit status, `stdout` is in "
        "its output, `stderr` is in its error output",
        "object",
    ),
]
Files = Sequence[Mapping[str, str]]
Tabs = Annotated[Sequence[str], Key("an address for each tab", may_be_empty=True)]


@verb(example={"command": "mkdir -p notes && echo milk > notes/todo.txt", "shell": True})
async def execute(
    context: SetupContext,
    *,
    command: Command,
    shell: Shell = False,
    stdout: Annotated[str, Key("the name under which the getter `cache_file` finds its output")] = "",
    stderr: Annotated[str, Key("the same for its error output")] = "",
    until: Until = None,
) -> None:
    """Runs a command until it exits, and ignores its exit status. It is an error if the command cannot be started, does
    not end in time, is killed, or does not reach `until`."""
    import asyncio  # here: a program that only checks tasks does not need it

    filled = _fill(command, context)
    deadline, num_failures = time.monotonic() + UNTIL_TIMEOUT_S, 0
    while True:
        result = await context.guest.execute(
            filled, shell=shell, timeout_s=min(120.0, context.command_limit_s), setup=True
        )
        if result.was_killed:
            raise SetupError(f"the command {_brief(filled)} was killed in its desktop")
        if result.status == "success":
            for name, text in ((stdout, result.output), (stderr, result.error)):
                if name:
                    context.cache.put(name, text.encode())
        elif not until:
            raise SetupError(f"the command {_brief(filled)} could not be run: {result.error[:200]}")
        else:
            num_failures += 1
        if not until or _is_reached(result, until):
            return
        if num_failures >= UNTIL_MAX_FAILURES or time.monotonic() > deadline:
            raise SetupError(
                f"the command {_brief(filled)} did not reach {dict(until)} within {UNTIL_TIMEOUT_S:g} s, or "
                f"failed to run in {UNTIL_MAX_FAILURES} attempts"
            )
        await asyncio.sleep(UNTIL_INTERVAL_S)


command = replace(
    execute,
    name="command",
    about="Another name of `execute`.",
    example={"type": "command", "parameters": {"command": ["mkdir", "-p", "/home/user/notes"]}},
)


@verb(opens_window=True, failure="is ignored before grading", example={"command": ["xterm", "-maximized"]})
async def launch(context: SetupContext, *, command: Command, shell: Shell = False) -> None:
    """Starts a program and lets it run."""
    filled = _fill(command, context)
    if isinstance(filled, str) and not shell and len(filled.split()) > 1:
        filled = filled.split()
    await context.guest.launch(filled, shell=shell)


@verb(name="open", opens_window=True, example={"path": "/home/user/todo.txt"})
async def open_file(context: SetupContext, *, path: Annotated[str, Key("the file in the desktop")]) -> None:
    """Opens a file in the program for its kind."""
    await context.guest.open_file(path)


@verb(example={"files": [{"url": "https://www.example.com/table.csv", "path": "/home/user/table.csv"}]})
async def download(
    context: SetupContext,
    *,
    files: Annotated[Files, Key("`path` is that in the desktop", "list of files with url and path", may_be_empty=True)],
) -> None:
    """Downloads files from the web into the desktop, from hosts that the env server allows."""
    for file in files:
        if not file["url"]:
            raise SetupError("the parameter 'url' must be a non-empty string")
        await context.guest.upload(file["path"], await context.download(file["url"]))


@verb(example={"files": [{"path": "/home/user/todo.txt", "content": "milk\n"}]})
async def upload_file(
    context: SetupContext,
    *,
    files: Annotated[
        Files,
        Key(
            "`path` is that in the desktop; `local_path` is below the env server's upload folder",
            "list of files with path and content, content_base64 or local_path",
            may_be_empty=True,
        ),
    ],
) -> None:
    """Puts files into the desktop."""
    for file in files:
        await context.guest.upload(file["path"], await _content(file, context))


async def _content(file: Mapping[str, str], context: SetupContext) -> bytes:
    """`content` and `content_base64` are our extensions."""
    if "content" in file:
        return file["content"].encode()
    if "content_base64" in file:
        try:
            return binascii.a2b_base64(file["content_base64"], strict_mode=True)
        except (binascii.Error, ValueError) as error:
            raise SetupError(f"content_base64 of {file['path']} is not valid base64") from error
    return await context.read_upload(file.get("local_path", ""))


@verb(failure="is ignored", example={"window_name": "Terminal"})
async def activate_window(
    context: SetupContext, *, window_name: WindowName, strict: IsStrict = False, by_class: ByClass = False
) -> None:
    """Brings a window to the front. A missing window is ignored."""
    await context.guest.activate_window(window_name, strict=strict, by_class=by_class)


@verb(failure="is ignored", example={"window_name": "Terminal"})
async def close_window(
    context: SetupContext, *, window_name: WindowName, strict: IsStrict = False, by_class: ByClass = False
) -> None:
    """Closes a window. A missing window is ignored."""
    await context.guest.close_window(window_name, strict=strict, by_class=by_class)


@verb(failure="is ignored before grading", example={"path": "/home/user/hills.png"})
async def change_wallpaper(context: SetupContext, *, path: Annotated[str, Key("a picture in the desktop")]) -> None:
    """Sets the desktop background."""
    await context.guest.change_wallpaper(path)


@verb(opens_window=True, failure="is ignored before grading", example={"urls_to_open": ["https://www.example.com"]})
async def chrome_open_tabs(context: SetupContext, *, urls_to_open: Tabs) -> None:
    """Opens tabs in a running browser, and closes the initial one."""
    await context.open_tabs(urls_to_open)


@verb(failure="is ignored before grading", example={"urls_to_close": ["https://www.example.com"]})
async def chrome_close_tabs(context: SetupContext, *, urls_to_close: Tabs) -> None:
    """Closes tabs of the browser."""
    await context.close_tabs(urls_to_close)


@verb(example={"seconds": 1})
async def sleep(context: SetupContext, *, seconds: Annotated[float, Key("how long", "number from 0")]) -> None:
    """Waits; up to the env server's limit, 60 s by default."""
    import asyncio

    if seconds > context.sleep_limit_s:
        raise SetupError(f"a sleep must be 0 to {context.sleep_limit_s:g} seconds, not {seconds!r}")
    await asyncio.sleep(seconds)


VERBS: Mapping[str, Verb] = collect(Verb, globals())


def _fill(command: str | Sequence[str], context: SetupContext) -> str | list[str]:
    """OSWorld's placeholders for the password and the screen."""
    width, height = context.screen
    values = {
        "{CLIENT_PASSWORD}": CLIENT_PASSWORD,
        "{SCREEN_WIDTH_HALF}": str(width // 2),
        "{SCREEN_HEIGHT_HALF}": str(height // 2),
        "{SCREEN_WIDTH}": str(width),
        "{SCREEN_HEIGHT}": str(height),
    }

    def fill(text: str) -> str:
        for name, value in values.items():
            text = text.replace(name, value)
        return text

    return fill(command) if isinstance(command, str) else [fill(part) for part in command]


def _is_reached(result: CommandResult, until: Mapping[str, Any]) -> bool:
    return result.status == "success" and (
        ("returncode" in until and result.returncode == until["returncode"])
        or ("stdout" in until and until["stdout"] in result.output)
        or ("stderr" in until and until["stderr"] in result.error)
    )


def _brief(command: str | Sequence[str]) -> str:
    return repr(command if isinstance(command, str) else list(command))[:120]
