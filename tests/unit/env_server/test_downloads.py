"""Downloads: only from allowed hosts, only once, onto disk, and only as many as there is room for."""

import asyncio
import os
import time
from pathlib import Path

import httpx
import pytest

from env_server.driving.download import Downloader
from env_server.driving.download_cache import DownloadCache
from env_server.settings import TaskLimits
from osworld_pipeline.errors import SetupError

LIMITS = TaskLimits(download_hosts=("files.test",), download_max_bytes=1000)


class Web:
    """Answers every address with its path, and records the requests."""

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self.asked: list[str] = []
        self.delay_s = delay_s
        self.status = 200

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        await asyncio.sleep(self.delay_s)
        return httpx.Response(self.status, content=request.url.path.encode() * 10)


def downloader(web: Web, folder: Path | None, limits: TaskLimits = LIMITS, **options: int) -> Downloader:
    return Downloader(limits, folder=folder, transport=httpx.MockTransport(web), **options)


def kept(folder: Path) -> list[int]:
    """The sizes of the files in a folder."""
    return [path.stat().st_size for path in folder.iterdir()]


async def test_a_file_is_fetched_once_even_by_another_server(tmp_path: Path) -> None:
    web = Web()
    for _ in range(2):
        server = downloader(web, tmp_path)
        assert await server.fetch("http://files.test/a") == b"/a" * 10
        assert await server.fetch("http://files.test/a") == b"/a" * 10
        await server.close()
    assert web.asked == ["/a"]


async def test_concurrent_requests_for_one_file_fetch_it_once(tmp_path: Path) -> None:
    web = Web(delay_s=0.05)
    server = downloader(web, tmp_path)
    assert set(await asyncio.gather(*(server.fetch("http://files.test/a") for _ in range(20)))) == {b"/a" * 10}
    assert web.asked == ["/a"]
    await server.close()


async def test_a_cancelled_request_does_not_end_the_download_for_the_others(tmp_path: Path) -> None:
    server = downloader(Web(delay_s=0.1), tmp_path)
    first = asyncio.create_task(server.fetch("http://files.test/a"))
    second = asyncio.create_task(server.fetch("http://files.test/a"))
    await asyncio.sleep(0.03)
    first.cancel()
    assert await second == b"/a" * 10
    assert first.cancelled()
    await server.close()


async def test_a_failed_download_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    web = Web()
    web.status = 503
    server = downloader(web, tmp_path)
    with pytest.raises(SetupError, match="answered 503"):
        await server.fetch("http://files.test/a")
    assert kept(tmp_path) == []
    web.status = 200
    assert await server.fetch("http://files.test/a") == b"/a" * 10
    await server.close()


async def test_a_file_too_large_or_too_slow_leaves_nothing(tmp_path: Path) -> None:
    large = downloader(Web(), tmp_path, TaskLimits(download_hosts=("files.test",), download_max_bytes=19))
    with pytest.raises(SetupError, match="larger than 19 bytes"):
        await large.fetch("http://files.test/a")
    slow = downloader(Web(delay_s=5), tmp_path, TaskLimits(download_hosts=("files.test",), download_timeout_s=0.05))
    with pytest.raises(SetupError, match=r"more than 0\.05 s"):
        await slow.fetch("http://files.test/a")
    assert kept(tmp_path) == []
    await large.close()
    await slow.close()


async def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    web = Web()
    server = downloader(web, tmp_path, cache_max_bytes=50)
    for name in ("a", "b", "a", "c"):
        await server.fetch(f"http://files.test/{name}")
        time.sleep(0.01)  # noqa: ASYNC251 - file times must differ
    assert sum(kept(tmp_path)) <= 50
    await server.fetch("http://files.test/a")
    assert web.asked == ["/a", "/b", "/c"]
    await server.fetch("http://files.test/b")
    assert web.asked == ["/a", "/b", "/c", "/b"]
    await server.close()


async def test_a_file_larger_than_the_cache_is_still_returned(tmp_path: Path) -> None:
    server = downloader(Web(), tmp_path, cache_max_bytes=5)
    assert await server.fetch("http://files.test/a") == b"/a" * 10
    await server.close()


async def test_an_address_that_is_kept_but_no_longer_allowed_is_refused(tmp_path: Path) -> None:
    before = downloader(Web(), tmp_path)
    await before.fetch("http://files.test/a")
    await before.close()
    after = downloader(Web(), tmp_path, TaskLimits(download_hosts=()))
    with pytest.raises(SetupError, match="not allowed"):
        await after.fetch("http://files.test/a")
    await after.close()


@pytest.mark.parametrize("url", ["", "a", "http://", "http://[", "ftp://files.test/a", "file:///etc/passwd"])
async def test_an_address_that_is_not_a_web_address_is_refused(tmp_path: Path, url: str) -> None:
    server = downloader(Web(), tmp_path)
    with pytest.raises(SetupError, match="not a web address"):
        await server.fetch(url)
    await server.close()


async def test_a_folder_that_cannot_be_written_is_a_set_up_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = downloader(Web(), tmp_path / "file")
    with pytest.raises(SetupError, match="cannot be kept"):
        await server.fetch("http://files.test/a")
    await server.close()


async def test_without_a_folder_files_are_kept_until_the_server_closes() -> None:
    server = downloader(Web(), None)
    assert await server.fetch("http://files.test/a") == b"/a" * 10
    folder = server._temporary
    assert folder is not None
    assert folder.is_dir()
    await server.close()
    assert not folder.exists()


def test_a_partial_file_that_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / ".part-old", tmp_path / ".part-new"
    old.write_text("x")
    new.write_text("x")
    os.utime(old, (0, 0))
    DownloadCache(tmp_path).begin().discard()
    assert (old.exists(), new.exists()) == (False, True)
