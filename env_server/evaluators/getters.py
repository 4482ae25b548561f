"""Getters: each reads one part of the state of a desktop (or of the task) under OSWorld's name. None means that it does
not exist; a malformed config raises, and grading turns that into an EvaluatorError."""

import logging
import os.path
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from env_server.evaluators.result_file import EpisodeCache, ResultFile
from env_server.guest_client import CommandResult, FileTooLargeError, GuestClient
from osworld_pipeline.errors import TamperingError

Config = Mapping[str, Any]
Getter = Callable[[GuestClient, EpisodeCache, Config], Awaitable[Any]]
COMMAND_TIMEOUT_S = 60.0
log = logging.getLogger("env_server")


async def get_rule(guest: GuestClient, cache: EpisodeCache, config: Config) -> Any:
    return config["rules"]


async def get_vm_command_line(guest: GuestClient, cache: EpisodeCache, config: Config) -> str | None:
    """Standard output; None if the command could not be started or did not end in time."""
    result = await _run(guest, config)
    return result.output if result.status == "success" else None


async def get_vm_command_error(guest: GuestClient, cache: EpisodeCache, config: Config) -> str | None:
    """Standard error; None as for vm_command_line."""
    result = await _run(guest, config)
    return result.error if result.status == "success" else None


async def _run(guest: GuestClient, config: Config) -> CommandResult:
    """Raises TamperingError if it was killed: in a running desktop only the desktop's own programs can do that."""
    result = await guest.execute(
        config["command"], shell=config.get("shell", False), timeout_s=COMMAND_TIMEOUT_S, is_graders=True
    )
    if result.was_killed:
        raise TamperingError(f"the grader's command {str(config['command'])[:120]!r} was killed in its desktop")
    return result


async def get_vm_terminal_output(guest: GuestClient, cache: EpisodeCache, config: Config) -> str | None:
    return await guest.terminal()


async def get_accessibility_tree(guest: GuestClient, cache: EpisodeCache, config: Config) -> str:
    return await guest.accessibility()


async def get_vm_screen_size(guest: GuestClient, cache: EpisodeCache, config: Config) -> dict[str, int]:
    width, height = await guest.screen_size()
    return {"width": width, "height": height}


async def get_vm_window_size(guest: GuestClient, cache: EpisodeCache, config: Config) -> dict[str, int] | None:
    size = await guest.window_size(config["app_class_name"])
    return None if size is None else {"width": size[0], "height": size[1]}


async def get_vm_wallpaper(guest: GuestClient, cache: EpisodeCache, config: Config) -> ResultFile:
    """Returns an empty file if there is no wallpaper, as OSWorld does."""
    file = await _fetch(cache, config["dest"], lambda max_bytes: guest.wallpaper(max_bytes=max_bytes))
    return file or ResultFile(name=config["dest"], data=b"")


async def get_list_directory(guest: GuestClient, cache: EpisodeCache, config: Config) -> dict[str, Any] | None:
    return await guest.list_directory(config["path"])


async def get_cache_file(guest: GuestClient, cache: EpisodeCache, config: Config) -> ResultFile:
    """A file that a set-up verb stored. KeyError if none did: the task file is wrong."""
    file = cache.get(config["path"])
    if file is None:
        raise KeyError(f"no set-up verb stored a file named {config['path']!r}")
    return file


async def get_vm_file(
    guest: GuestClient, cache: EpisodeCache, config: Config
) -> ResultFile | list[ResultFile | None] | None:
    """One file; with `multi` several, and `gives` lists the positions that the metric receives."""
    if not config.get("multi", False):
        dest = config["dest"]
        if config.get("time_suffix", False):
            stem, ending = os.path.splitext(dest)
            dest = f"{stem}_{time.strftime(config.get('time_format', '%Y%m%d_%H%M%S'))}{ending}"
        return await _fetch_path(guest, cache, config["path"], dest)
    gives = set(config.get("gives", [0]))
    files = []
    for index, (path, dest) in enumerate(zip(config["path"], config["dest"], strict=True)):
        file = await _fetch_path(guest, cache, path, dest)
        if index in gives:
            files.append(file)
    return files[0] if len(files) == 1 else files


async def _fetch_path(guest: GuestClient, cache: EpisodeCache, path: str, dest: str) -> ResultFile | None:
    return await _fetch(cache, dest, lambda max_bytes: guest.file(path, max_bytes=max_bytes))


async def _fetch(cache: EpisodeCache, dest: str, read: Callable[[int], Awaitable[bytes | None]]) -> ResultFile | None:
    """Also None for a file that is too large to be an answer: a policy must not cause a fault by writing one."""
    try:
        return await cache.fetch(dest, read)
    except FileTooLargeError as error:
        log.warning("%s: graded as a missing file", error)
        return None


GETTERS: Mapping[str, Getter] = {
    "accessibility_tree": get_accessibility_tree,
    "cache_file": get_cache_file,
    "list_directory": get_list_directory,
    "rule": get_rule,
    "vm_command_error": get_vm_command_error,
    "vm_command_line": get_vm_command_line,
    "vm_file": get_vm_file,
    "vm_screen_size": get_vm_screen_size,
    "vm_terminal_output": get_vm_terminal_output,
    "vm_wallpaper": get_vm_wallpaper,
    "vm_window_size": get_vm_window_size,
}
