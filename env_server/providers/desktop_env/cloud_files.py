"""Files that an evaluator's `cloud_file` getters name by URL. The env server fetches them before grading, with its own
checks: OSWorld's getter then finds them in its folder, and has no network."""

from collections.abc import Iterator, Mapping
from typing import Any

from env_server.driving.download import Downloader, check_address
from env_server.evaluators.episode_cache import EpisodeCache
from env_server.settings import TaskLimits
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import SetupError, TaskError


def check_cloud_files(task: Task, limits: TaskLimits) -> None:
    """
    Raises:
        TaskError: an address may not be fetched, or a `cloud_file` is malformed.
    """
    for url, _ in _cloud_files(task):
        try:
            check_address(url, limits)
        except SetupError as error:
            raise TaskError(
                f"the evaluator of task {task.task_id} needs a file that may not be downloaded: {error}"
            ) from error


async def fetch_cloud_files(task: Task, downloader: Downloader, cache: EpisodeCache) -> None:
    """Fetches the files that are not in the cache, as OSWorld's getter does.

    Raises:
        SetupError: a file could not be downloaded.
        EvaluatorError: together they are too large.
    """
    for url, name in _cloud_files(task):
        if cache.get(name) is None:
            cache.put(name, await downloader.fetch(url))


def _cloud_files(task: Task) -> Iterator[tuple[str, str]]:
    """(address, name)."""
    evaluator = task.config["evaluator"]
    for key in ("result", "expected"):
        value = evaluator.get(key)
        for config in value if isinstance(value, list) else [value]:
            if isinstance(config, Mapping) and config.get("type") == "cloud_file":
                yield from _pairs(task.task_id, config)


def _pairs(task_id: str, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    urls, names = config.get("path"), config.get("dest")
    if not config.get("multi", False):
        urls, names = [urls], [names]
    if not isinstance(urls, list) or not isinstance(names, list) or len(urls) != len(names):
        raise TaskError(f"task {task_id} has a cloud_file with different numbers of 'path' and 'dest'")
    pairs = [
        (url, name) for url, name in zip(urls, names, strict=True) if isinstance(url, str) and isinstance(name, str)
    ]
    if len(pairs) != len(urls):
        raise TaskError(f"task {task_id} has a cloud_file whose 'path' or 'dest' is not a string")
    return pairs
