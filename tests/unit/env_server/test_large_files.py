"""Large graded files: a policy's files cause no grading fault and do not decide how much memory the server uses."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from fake_desktops import FakeDesktop

from env_server.evaluators.episode_cache import (
    MAX_CHECK_BYTES,
    MAX_FILE_BYTES,
    NUM_LARGE_CHECKS,
    SMALL_BYTES,
    EpisodeCache,
    LargeChecks,
)
from env_server.evaluators.grading import grade
from osworld_pipeline.task_schema.context import ResultFile
from osworld_pipeline.task_schema.reading import read_grader

RunMetric = Callable[[str, Sequence[Any], Mapping[str, Any]], Any]


def file_check(*paths: str) -> dict[str, Any]:
    """One check that holds all of these."""
    dest = [path.strip("/") for path in paths]
    return {"type": "vm_file", "path": list(paths), "dest": dest, "multi": True, "gives": list(range(len(paths)))}


def grading(desktop: FakeDesktop, cache: EpisodeCache, run_metric: RunMetric, *results: dict[str, Any]) -> Any:
    rules = {"type": "rule", "rules": {"expected": ["x"]}}
    evaluator = {
        "func": ["file_contains"] * len(results),
        "result": list(results),
        "expected": [rules] * len(results),
    }
    return grade(read_grader("t", evaluator), desktop.guest, cache, last_action="DONE", run_metric=run_metric)


def desktop_with(**sizes: int) -> FakeDesktop:
    desktop = FakeDesktop("d")
    desktop.files.update({f"/{name}": b"x" * size for name, size in sizes.items()})
    return desktop


class Metric:
    """Waits until `gate` is set; records the sizes of the files that it gets."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []
        self.num_running = self.most_running = 0
        self.gate = asyncio.Event()

    async def __call__(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> float:
        files: list[ResultFile | None] = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
        self.sizes.append([len(file.data) for file in files if file is not None])
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await self.gate.wait()
        self.num_running -= 1
        return 1.0


async def test_nine_of_the_largest_files_are_not_a_fault_and_stay_within_the_byte_limit_of_a_check() -> None:
    metric = Metric()
    metric.gate.set()
    desktop = FakeDesktop("d")
    paths = [f"/{number}" for number in range(9)]
    desktop.files.update(dict.fromkeys(paths, b"x" * (30 << 20)))
    assert await grading(desktop, EpisodeCache(), metric, file_check(*paths)) == 1.0
    assert metric.sizes == [[30 << 20] * 2]
    assert await grading(desktop, EpisodeCache(), metric, *map(file_check, paths)) == 1.0
    assert metric.sizes[1:] == [[30 << 20]] * 9


async def test_few_checks_of_a_server_hold_large_files_at_once_and_every_one_is_graded() -> None:
    metric, large_checks = Metric(), LargeChecks()
    desktop = desktop_with(large=SMALL_BYTES + 1, small=SMALL_BYTES, half=SMALL_BYTES // 2 + 1)
    large = [
        asyncio.ensure_future(grading(desktop, EpisodeCache(large_checks), metric, file_check(*paths)))
        for paths in [("/large",), ("/half", "/half2", "/half")] * (2 * NUM_LARGE_CHECKS)
    ]
    desktop.files["/half2"] = desktop.files["/half"]
    await asyncio.sleep(0.2)
    assert metric.num_running == NUM_LARGE_CHECKS
    small = [
        asyncio.ensure_future(grading(desktop, EpisodeCache(large_checks), metric, file_check("/small")))
        for _ in range(3)
    ]
    await asyncio.sleep(0.1)
    assert metric.num_running == NUM_LARGE_CHECKS + len(small)
    metric.gate.set()
    assert await asyncio.gather(*large, *small) == [1.0] * len([*large, *small])
    assert metric.most_running == NUM_LARGE_CHECKS + len(small)


async def test_a_grading_that_ends_early_lets_others_hold_large_files() -> None:
    metric, large_checks = Metric(), LargeChecks(1)
    desktop = desktop_with(large=SMALL_BYTES + 1)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await grading(desktop, EpisodeCache(large_checks), metric, file_check("/large"))
    metric.gate.set()
    assert await grading(desktop, EpisodeCache(large_checks), metric, file_check("/large")) == 1.0


async def test_an_episode_keeps_small_files_for_its_next_check_and_no_large_ones() -> None:
    metric = Metric()
    metric.gate.set()
    cache = EpisodeCache()
    desktop = desktop_with(large=SMALL_BYTES + 1, small=SMALL_BYTES, other=1)
    kept = {"type": "cache_file", "path": "small"}
    assert await grading(desktop, cache, metric, *map(file_check, ("/small", "/large", "/other")), kept) == 1.0
    assert [file.name for file in cache] == ["small"]
    assert metric.sizes[-1] == [SMALL_BYTES]


def test_one_file_of_the_largest_size_is_within_a_checks_bytes() -> None:
    assert SMALL_BYTES < MAX_FILE_BYTES <= MAX_CHECK_BYTES == 64 << 20
