"""The resources and addresses that OSWorld's graders may use, over a small desktop-env of the tests' own."""

import asyncio
import gc
import http.server
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from desktop_env_doubles import FAKE, fake_install, task_of

from env_server.driving.download import Downloader
from env_server.evaluators.episode_cache import EpisodeCache
from env_server.guest_client import GuestClient
from env_server.providers import requirements
from env_server.providers.desktop_env import grader_sandbox
from env_server.providers.desktop_env.grader_sandbox import DOORS, GraderLimits, GraderSandbox
from env_server.providers.desktop_env.graders import OSWorldGraders
from env_server.providers.desktop_env.install import DesktopEnvInstall
from env_server.providers.desktop_env.worker.processes import below
from env_server.settings import TaskLimits
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DependencyError, EvaluatorError, TaskError

INSTALL = fake_install()
LIMITS = GraderLimits(memory_bytes=256 << 20, cpu_s=1, num_processes=32, disk_bytes=64 << 20)
WORKERS = Path(grader_sandbox.__file__).parent / "worker"
ALLOWED, REFUSED = "http://allowed.example/gold.txt", "http://refused.example/gold.txt"


class _Guest(http.server.BaseHTTPRequestHandler):
    """Answers every request with Linux."""

    calls: list[str]

    def do_GET(self) -> None:
        self.calls.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"Linux")

    def log_message(self, *_: object) -> None: ...


class _Host:
    """A server on this machine's loopback, and the paths that it was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        handler = type("Handler", (_Guest,), {"calls": self.calls})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def host() -> Iterator[_Host]:
    host = _Host()
    yield host
    host.close()


@pytest.fixture
async def guest(host: _Host) -> AsyncIterator[GuestClient]:
    async with GuestClient.over_tcp(host.url, name="g") as guest:
        yield guest


@pytest.fixture
async def graders() -> AsyncIterator[OSWorldGraders]:
    there = below(os.getpid())  # of tests that ran before in this process
    answers = httpx.MockTransport(lambda request: httpx.Response(200, text=f"gold of {request.url.host}"))
    downloader = Downloader(TaskLimits(download_hosts=("allowed.example",)), transport=answers)
    graders = OSWorldGraders(python=INSTALL.python, install=INSTALL, downloader=downloader, limits=LIMITS)
    yield graders
    await graders.close()
    await downloader.close()
    assert not below(os.getpid()) - there, "closed graders leave no process"


async def grade(graders: OSWorldGraders, guest: GuestClient, func: str = "exact_match", **task: Any) -> float:
    read = Task.from_config(task_of(func, **task))
    return await graders.read(read).grade(guest, EpisodeCache(), last_action=None)


async def test_a_getter_that_fetches_an_address_of_this_machine_reaches_nothing(
    graders: OSWorldGraders, guest: GuestClient, host: _Host
) -> None:
    page = {"type": "page", "url": f"{host.url}/secret"}
    assert await grade(graders, guest, result=page, wanted="unreachable") == 1.0
    assert host.calls == []
    there = {"type": "vm_file", "path": "there"}
    assert await grade(graders, guest, result=there, wanted="Linux") == 1.0, "and the guest is reached"
    assert host.calls == ["/file/there"]


async def test_only_the_server_fetches_a_file_that_a_task_names_by_address(
    graders: OSWorldGraders, guest: GuestClient
) -> None:
    gold = {"type": "cloud_file", "path": ALLOWED, "dest": "gold.txt"}
    assert await grade(graders, guest, result=gold, wanted="gold of allowed.example") == 1.0


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"path": REFUSED, "dest": "gold.txt"}, "downloads from refused.example are not allowed"),
        ({"path": "file:///etc/passwd", "dest": "gold.txt"}, "is not a web address"),
        ({"path": [ALLOWED, REFUSED], "dest": ["a", "b"], "multi": True}, "not allowed"),
        ({"path": [ALLOWED], "dest": ["a", "b"], "multi": True}, "different numbers"),
        ({"path": 7, "dest": "a"}, "is not a string"),
    ],
)
async def test_an_address_that_may_not_be_fetched_is_refused_before_a_desktop_is_taken(
    graders: OSWorldGraders, config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TaskError, match=sentence):
        graders.read(Task.from_config(task_of(result={"type": "cloud_file", **config})))


@pytest.mark.parametrize(
    ("func", "wanted"), [("spin", 0), ("take_memory", 10 << 30), ("take_memory_in_children", 100 << 20)]
)
async def test_a_grader_that_takes_too_much_is_ended_and_scores_0(
    graders: OSWorldGraders, guest: GuestClient, func: str, wanted: int, caplog: pytest.LogCaptureFixture
) -> None:
    start = time.monotonic()
    assert await grade(graders, guest, func, wanted=wanted) == 0.0
    assert time.monotonic() - start < 15
    assert "exceeds its limit" in caplog.text
    assert await grade(graders, guest) == 1.0, "and the next one is graded"


async def test_processes_of_a_grading_are_limited(graders: OSWorldGraders, guest: GuestClient) -> None:
    assert await grade(graders, guest, "fork", wanted=LIMITS.num_processes) == 1.0


async def test_memory_that_forked_processes_share_counts_once(graders: OSWorldGraders, guest: GuestClient) -> None:
    assert await grade(graders, guest, "share_memory", wanted=LIMITS.memory_bytes // 2) == 1.0


async def test_a_grader_that_dies_is_a_fault_and_not_a_score(graders: OSWorldGraders, guest: GuestClient) -> None:
    with pytest.raises(EvaluatorError, match="was interrupted: the grader's process ended with status 3"):
        await grade(graders, guest, "die")


async def test_files_and_processes_of_this_machine_are_invisible(
    graders: OSWorldGraders, guest: GuestClient, tmp_path: Path
) -> None:
    (tmp_path / "secret").touch()
    repository = Path(__file__).parents[3]
    for path in (tmp_path / "secret", repository / "README.md", Path(__file__), "/etc/passwd", "/etc/hostname", "/var"):
        assert os.path.exists(path)  # noqa: ASYNC240 - of a local disk
        assert await grade(graders, guest, "sees", wanted=str(path)) == 0.0, path
    assert await grade(graders, guest, "sees", wanted=str(WORKERS / "sandboxed.py")) == 1.0
    assert await grade(graders, guest, "num_processes", wanted=1) == 1.0


async def test_a_grader_can_change_nothing_that_the_next_one_sees(graders: OSWorldGraders, guest: GuestClient) -> None:
    folders = ["/", "/usr", "/dev", "/etc", str(WORKERS), str(FAKE), str(INSTALL.python.parents[1])]
    assert await grade(graders, guest, "leave", wanted=folders) == 1.0
    for folder in ("/tmp", "/dev/shm"):
        assert await grade(graders, guest, "sees", wanted=f"{folder}/left") == 0.0


async def test_two_hundred_gradings_in_quick_succession_do_not_disturb_each_other(
    graders: OSWorldGraders, guest: GuestClient
) -> None:
    gradings = [grade(graders, guest, wanted="wrong" if number % 3 else "right") for number in range(200)]
    scores = await asyncio.gather(*gradings)
    assert scores == [float(number % 3 == 0) for number in range(200)]


async def test_desktop_env_below_tmp_is_found(guest: GuestClient) -> None:
    """Every grader's /tmp is its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        shutil.copytree(FAKE, f"{folder}/fake")
        install = DesktopEnvInstall.find(Path(sys.executable), (Path(folder, "fake"),))
        graders = OSWorldGraders(python=install.python, install=install, limits=LIMITS)
        try:
            assert await grade(graders, guest) == 1.0
            lazy = str(Path(folder, "fake/desktop_env/screen.png"))
            assert await grade(graders, guest, "sees", wanted=lazy) == 1.0
            assert await grade(graders, guest, "leave", wanted=[f"{folder}/fake"]) == 1.0
        finally:
            await graders.close()


async def test_a_grading_that_is_cancelled_while_its_grader_comes_up_leaves_no_socket(
    graders: OSWorldGraders, guest: GuestClient
) -> None:
    assert await grade(graders, guest) == 1.0
    sockets = _num_sockets()
    grading = asyncio.create_task(grade(graders, guest))
    async with asyncio.timeout(10):
        while _num_sockets() < sockets + 1 + len(DOORS):  # noqa: ASYNC110 - at the first step after they came
            await asyncio.sleep(0)
    grading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await grading
    del grading
    gc.collect()  # a socket that was not closed is a warning, which fails the test
    assert _num_sockets() == sockets


def _num_sockets() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(link.startswith("socket:") for link in links)


async def test_a_sandbox_that_was_killed_is_made_again(graders: OSWorldGraders, guest: GuestClient) -> None:
    assert await grade(graders, guest) == 1.0
    grading = asyncio.create_task(grade(graders, guest, "hang"))
    await asyncio.sleep(0.3)
    for pid in below(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(EvaluatorError):
        await grading
    assert await asyncio.gather(*(grade(graders, guest) for _ in range(4))) == [1.0] * 4


@pytest.mark.parametrize("milliseconds", [0, 1, 2, 3, 5, 10, 20, 40, 80])
async def test_a_sandbox_that_is_closed_while_it_starts_leaves_no_process(milliseconds: int) -> None:
    sandbox = GraderSandbox(INSTALL)
    sandbox.start()
    await asyncio.sleep(milliseconds / 1000)
    await sandbox.close()
    assert not below(os.getpid())


def test_a_killed_server_leaves_no_grader(tmp_path: Path) -> None:
    program = f"""
        import asyncio, os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from desktop_env_doubles import fake_install
        from env_server.providers.desktop_env.grader_sandbox import GraderSandbox
        from env_server.providers.desktop_env.worker.processes import below
        async def main():
            sandbox = GraderSandbox(fake_install())
            async with sandbox.grader():
                print(*below(os.getpid()), flush=True)
                await asyncio.sleep(60)
        asyncio.run(main())
    """
    server = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        processes = server.stdout.readline().split()
        assert len(processes) >= 5, "bubblewrap and its process 1, the one that forks, a supervisor, a grader"
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    end = time.monotonic() + 20
    while any(_is_running(pid) for pid in processes):
        assert time.monotonic() < end
        time.sleep(0.05)


def _is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_without_bubblewrap_graders_are_refused_unless_the_operator_allows_it(
    tmp_path: Path,
    guest: GuestClient,
    host: _Host,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(requirements, "SYSTEM_PATH", str(tmp_path))  # a folder without programs
    options: dict[str, Any] = {"python": INSTALL.python, "install": INSTALL, "folder": tmp_path}
    with pytest.raises(DependencyError, match=r"cannot be sandboxed: .* --allow-unsandboxed-graders"):
        OSWorldGraders(**options)
    graders = OSWorldGraders(**options, allow_unsandboxed=True)
    try:
        assert await grade(graders, guest) == 1.0
        assert "WITHOUT A SANDBOX" in caplog.text
        page = {"type": "page", "url": f"{host.url}/secret"}
        assert await grade(graders, guest, result=page, wanted="Linux") == 1.0, "the address is reached"
        assert await grade(graders, guest, "sees", wanted=__file__) == 1.0, "and so are files"
    finally:
        await graders.close()
