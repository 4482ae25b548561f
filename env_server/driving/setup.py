"""Runs set-up verbs: the steps of a task's `config` on a fresh desktop, and of its `postconfig` before grading.

A verb that fails is a SetupError. Two exceptions follow OSWorld: a window that is not found by its title, because
titles differ between desktops; and, before grading, a program that does not start, a wallpaper that cannot be set, and
browser tabs that cannot be opened or closed: if the agent broke them, the agent has failed its task, and that is no
fault.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from env_server.driving import browser
from env_server.driving.download import Downloader
from env_server.evaluators.episode_cache import EpisodeCache
from env_server.guest_client import GuestClient
from env_server.settings import TaskLimits
from osworld_pipeline.errors import SetupError
from osworld_pipeline.task_schema.context import SetupContext
from osworld_pipeline.task_schema.verbs import VERBS

log = logging.getLogger(__name__)


def setup_context(
    guest: GuestClient, cache: EpisodeCache, downloader: Downloader, *, limits: TaskLimits, screen: tuple[int, int]
) -> SetupContext:
    return SetupContext(
        guest=guest,
        cache=cache,
        screen=screen,
        download=downloader.fetch,
        read_upload=lambda path: asyncio.to_thread(_read_upload, limits.upload_root, path),
        open_tabs=partial(browser.open_tabs, guest),
        close_tabs=partial(browser.close_tabs, guest),
        command_limit_s=limits.setup_timeout_s,
        sleep_limit_s=limits.sleep_s,
    )


async def run_verbs(
    verbs: Sequence[Mapping[str, Any]], context: SetupContext, *, is_before_grading: bool = False
) -> None:
    """Runs verbs in order.

    Raises:
        SetupError: names the verb that failed.
        ReplicaError: the desktop died meanwhile.
    """
    for index, item in enumerate(verbs, start=1):
        verb = VERBS[item["type"]]
        try:
            await verb(context, **item.get("parameters", {}))
        except SetupError as error:
            if verb.failure != "is ignored" and not (is_before_grading and verb.failure == "is ignored before grading"):
                raise SetupError(f"set-up verb {index} ({verb.name}) failed: {error}") from error
            log.warning("verb %d (%s) had no effect: %s", index, verb.name, error)
        except (TypeError, AttributeError, KeyError) as error:
            # A verb with unknown parameters, or with values of another type than OSWorld's.
            raise SetupError(f"set-up verb {index} ({verb.name}) has wrong parameters: {error}") from error


def _read_upload(root: Path | None, local_path: str) -> bytes:
    if root is None:
        raise SetupError(
            f"{local_path!r} is a file of this server, and uploads are not allowed; start it with --upload-root"
        )
    source = (root / local_path).resolve()
    if not source.is_relative_to(root.resolve()):
        raise SetupError(f"{local_path!r} is outside the server's upload folder")
    try:
        return source.read_bytes()
    except OSError as error:
        raise SetupError(f"{local_path!r} cannot be read: {error.strerror}") from error
