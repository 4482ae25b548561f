"""OSWorld's set-up verbs: the steps of a task's `config` on a fresh desktop, and of its `postconfig` before grading.

A verb that fails is a SetupError. Two exceptions follow OSWorld: a window that is not found by its title, because
titles differ between desktops, and, before grading, a program that does not start: if the agent broke it, the agent
has failed its task, and that is no fault.
"""

import asyncio
import base64
import binascii
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env_server.episodes import browser
from env_server.episodes.download import Downloader
from env_server.evaluators.result_file import EpisodeCache
from env_server.guest_client import CommandResult, GuestClient
from env_server.settings import TaskLimits
from osworld_pipeline.errors import SetupError

log = logging.getLogger(__name__)

UNTIL_TIMEOUT_S = 60.0
UNTIL_INTERVAL_S = 0.3
UNTIL_MAX_FAILURES = 5
CLIENT_PASSWORD = "password"  # noqa: S105 - OSWorld's public password of its guest user
_WINDOW_VERBS = ("activate_window", "close_window")
_PROGRAM_VERBS = ("launch", "change_wallpaper", "chrome_open_tabs", "chrome_close_tabs")
OPENING_VERBS = ("launch", "open", "chrome_open_tabs")
"""Verbs that usually open a window."""


@dataclass(frozen=True, kw_only=True)
class SetupContext:
    """The desktop, files and limits of the verbs."""

    guest: GuestClient
    cache: EpisodeCache
    downloader: Downloader
    limits: TaskLimits
    screen: tuple[int, int]


Verb = Callable[..., Awaitable[None]]


async def run_verbs(
    verbs: Sequence[Mapping[str, Any]], context: SetupContext, *, is_before_grading: bool = False
) -> None:
    """Runs verbs in order.

    Raises:
        SetupError: names the verb that failed.
        ReplicaError: the desktop died meanwhile.
    """
    for index, verb in enumerate(verbs, start=1):
        name, parameters = verb["type"], dict(verb.get("parameters", {}))
        try:
            await VERBS[name](context, **parameters)
        except SetupError as error:
            if name not in _WINDOW_VERBS and not (is_before_grading and name in _PROGRAM_VERBS):
                raise SetupError(f"set-up verb {index} ({name}) failed: {error}") from error
            log.warning("verb %d (%s) had no effect: %s", index, name, error)
        except (TypeError, AttributeError, KeyError) as error:
            # A verb with unknown parameters, or with values of another type than OSWorld's.
            raise SetupError(f"set-up verb {index} ({name}) has wrong parameters: {error}") from error


async def execute(
    context: SetupContext,
    command: str | Sequence[str],
    stdout: str = "",
    stderr: str = "",
    shell: bool = False,
    until: Mapping[str, Any] | None = None,
) -> None:
    """Runs a command to its end; its exit status is ignored, unless `until` names what to wait for. `stdout` and
    `stderr` name files of the episode's cache."""
    filled = _fill(command, context)
    deadline, num_failures = time.monotonic() + UNTIL_TIMEOUT_S, 0
    while True:
        result = await context.guest.execute(
            filled, shell=shell, timeout_s=min(120.0, context.limits.setup_timeout_s), setup=True
        )
        if result.was_killed:
            raise SetupError(f"the command {_brief(filled)} was killed in its desktop")
        if result.status == "success":
            _keep(context.cache, stdout, result.output)
            _keep(context.cache, stderr, result.error)
        elif not until:
            raise SetupError(f"the command {_brief(filled)} could not be run: {result.error[:200]}")
        else:
            num_failures += 1
        if not until or _is_reached(result, until):
            return
        if num_failures >= UNTIL_MAX_FAILURES or time.monotonic() > deadline:
            raise SetupError(f"the command {_brief(filled)} did not reach {dict(until)} within {UNTIL_TIMEOUT_S:g} s")
        await asyncio.sleep(UNTIL_INTERVAL_S)


async def launch(context: SetupContext, command: str | Sequence[str], shell: bool = False) -> None:
    filled = _fill(command, context)
    if isinstance(filled, str) and not shell and len(filled.split()) > 1:
        filled = filled.split()
    await context.guest.launch(filled, shell=shell)


async def open_file(context: SetupContext, path: str) -> None:
    _need(path, "path")
    await context.guest.open_file(path)


async def download(context: SetupContext, files: Sequence[Mapping[str, str]]) -> None:
    for file in files:
        url, path = file.get("url", ""), file.get("path", "")
        _need(url, "url")
        _need(path, "path")
        await context.guest.upload(path, await context.downloader.fetch(url))


async def upload_file(context: SetupContext, files: Sequence[Mapping[str, str]]) -> None:
    """Each file has a `path` and one of `local_path` (below the server's upload folder), `content` (text) or
    `content_base64`; the last two are our extensions."""
    for file in files:
        path = file.get("path", "")
        _need(path, "path")
        await context.guest.upload(path, await _content(file, context.limits.upload_root))


async def _content(file: Mapping[str, str], root: Path | None) -> bytes:
    if "content" in file:
        return file["content"].encode()
    if "content_base64" in file:
        try:
            return base64.b64decode(file["content_base64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise SetupError(f"content_base64 of {file['path']} is not valid base64") from error
    local_path = file.get("local_path", "")
    if root is None:
        raise SetupError(
            f"{local_path!r} is a file of this server, and uploads are not allowed; start it with --upload-root"
        )
    return await asyncio.to_thread(_read_below, root, local_path)


def _read_below(root: Path, local_path: str) -> bytes:
    source = (root / local_path).resolve()
    if not source.is_relative_to(root.resolve()):
        raise SetupError(f"{local_path!r} is outside the server's upload folder")
    try:
        return source.read_bytes()
    except OSError as error:
        raise SetupError(f"{local_path!r} cannot be read: {error.strerror}") from error


async def activate_window(
    context: SetupContext, window_name: str, strict: bool = False, by_class: bool = False
) -> None:
    _need(window_name, "window_name")
    await context.guest.activate_window(window_name, strict=strict, by_class=by_class)


async def close_window(context: SetupContext, window_name: str, strict: bool = False, by_class: bool = False) -> None:
    _need(window_name, "window_name")
    await context.guest.close_window(window_name, strict=strict, by_class=by_class)


async def change_wallpaper(context: SetupContext, path: str) -> None:
    _need(path, "path")
    await context.guest.change_wallpaper(path)


async def chrome_open_tabs(context: SetupContext, urls_to_open: Sequence[str]) -> None:
    _need_all(urls_to_open, "urls_to_open")
    await browser.open_tabs(context.guest, urls_to_open)


async def chrome_close_tabs(context: SetupContext, urls_to_close: Sequence[str]) -> None:
    _need_all(urls_to_close, "urls_to_close")
    await browser.close_tabs(context.guest, urls_to_close)


async def sleep(context: SetupContext, seconds: float) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= context.limits.sleep_s:
        raise SetupError(f"a sleep must be 0 to {context.limits.sleep_s:g} seconds, not {seconds!r}")
    await asyncio.sleep(seconds)


VERBS: Mapping[str, Verb] = {
    "activate_window": activate_window,
    "change_wallpaper": change_wallpaper,
    "chrome_close_tabs": chrome_close_tabs,
    "chrome_open_tabs": chrome_open_tabs,
    "close_window": close_window,
    "command": execute,
    "download": download,
    "execute": execute,
    "launch": launch,
    "open": open_file,
    "sleep": sleep,
    "upload_file": upload_file,
}


def _fill(command: str | Sequence[str], context: SetupContext) -> str | list[str]:
    """OSWorld's placeholders for the password and the screen."""
    if not command:
        raise SetupError("the command is empty")
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

    if isinstance(command, str):
        return fill(command)
    if not all(isinstance(part, str) for part in command):
        raise SetupError(f"a command must be a string or a list of strings, not {_brief(command)}")
    return [fill(part) for part in command]


def _keep(cache: EpisodeCache, name: str, text: str) -> None:
    if name:
        cache.put(name, text.encode())


def _is_reached(result: CommandResult, until: Mapping[str, Any]) -> bool:
    return result.status == "success" and (
        ("returncode" in until and result.returncode == until["returncode"])
        or ("stdout" in until and until["stdout"] in result.output)
        or ("stderr" in until and until["stderr"] in result.error)
    )


def _need(value: object, name: str) -> None:
    if not isinstance(value, str) or not value:
        raise SetupError(f"the parameter {name!r} must be a non-empty string")


def _need_all(values: object, name: str) -> None:
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) and value for value in values):
        raise SetupError(f"the parameter {name!r} must be a list of non-empty strings")


def _brief(command: str | Sequence[str]) -> str:
    return repr(command if isinstance(command, str) else list(command))[:120]
