"""What a host can lack while the env server runs: every episode ends in one clear outcome, and the server continues or
ends with one clear sentence."""

import http.server
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from env_server_process import RunningServer, running_env_server
from fault_load import TASK

pytestmark = pytest.mark.desktop

SMALL = ("--screen-size", "640x480")
IMPATIENT = (*SMALL, "--queue-timeout-s", "1")
RECOVERY_LIMIT_S = 40.0
NUM_FILES = 240
WALLED = (
    'set -e; mount -t tmpfs tmp "$TMPDIR"; mount -t tmpfs -o size=64m state "$STATE"; '
    'mount -t tmpfs -o size=64k shm /dev/shm; cat /dev/zero > /dev/shm/full 2> /dev/null || true; exec "$@"'
)
"""In a mount namespace of its own: folders that can be filled, and a full /dev/shm."""
FULL_FROM_THE_START = 'set -e; mount -t tmpfs -o size=100k state "$STATE"; exec "$@"'

Answer = tuple[int, dict[str, Any]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture
def http_to() -> Iterator[Any]:
    """A client that keeps its connection, so that it needs no new one while none can be opened."""
    with httpx.Client(timeout=60, trust_env=False) as client:
        yield client


class Client:
    def __init__(self, http: httpx.Client, url: str) -> None:
        self._http, self._url = http, url

    def post(self, path: str, **body: Any) -> Answer:
        answer = self._http.post(f"{self._url}{path}", json=body)
        return answer.status_code, answer.json()

    def reset(self, config: Mapping[str, Any] = TASK.config) -> Answer:
        return self.post(
            "/reset", task_config=dict(config), env_config={"require_a11y_tree": False}, client_id="faults"
        )

    def episode(self, config: Mapping[str, Any] = TASK.config) -> float | Answer:
        """Runs an episode, and returns its reward or the first answer that is an error."""
        status, fields = self.reset(config)
        if status != 200:
            return status, fields
        of_episode = {"episode_id": fields["episode_id"]}
        try:
            for path, more in (("/step", {"action": "pyautogui.press('a')", "pause": 0.05}), ("/evaluate", {})):
                status, fields = self.post(path, **of_episode, **more)
                if status != 200:
                    return status, fields
            return fields["reward"]
        finally:
            self.post("/close", **of_episode)

    def begin(self) -> str:
        """Starts an episode once a desktop is free, and returns the episode's id."""
        until = time.monotonic() + RECOVERY_LIMIT_S
        while (reported := self.reset())[0] != 200:
            assert reported[1]["fault"] == "no_capacity", reported
            assert time.monotonic() < until, reported
        return reported[1]["episode_id"]

    def when_free(self, config: Mapping[str, Any] = TASK.config) -> float | Answer:
        """The result of `episode`, which is repeated while the desktop of the last episode is still being reset."""
        until = time.monotonic() + RECOVERY_LIMIT_S
        while isinstance(reported := self.episode(config), tuple) and reported[1]["fault"] == "no_capacity":
            assert time.monotonic() < until, reported
        return reported

    def until_it_works(self) -> None:
        until = time.monotonic() + RECOVERY_LIMIT_S
        while (reported := self.episode()) != 1.0:
            assert isinstance(reported, tuple), reported
            assert reported[1]["fault"] in ("no_capacity", "env_fault", "grader_fault"), reported
            assert time.monotonic() < until, reported
            time.sleep(0.2)


def check_stop(server: RunningServer) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0, server.log.read_text()[-2000:]
    assert "Traceback" not in server.log.read_text()


@contextmanager
def no_new_files(pid: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_server_without_file_descriptors_reports_it_and_recovers(
    tmp_path: Path, images: Path, http_to: httpx.Client
) -> None:
    with running_env_server(tmp_path, *IMPATIENT, images=images) as server:
        client = Client(http_to, server.url)
        episode_id = client.begin()
        with no_new_files(server.process.pid):
            status, reported = client.post("/evaluate", episode_id=episode_id)
            assert (status, reported["fault"]) in ((500, "env_fault"), (500, "grader_fault")), reported
            client.post("/close", episode_id=episode_id)
            status, reported = client.reset()
            assert (status, reported["fault"]) == (503, "no_capacity"), reported
        client.until_it_works()
        log = server.log.read_text()
        assert "is replaced" in log
        assert "Too many open files" in log
        check_stop(server)


def test_clients_use_at_most_half_of_the_open_files(tmp_path: Path, images: Path, http_to: httpx.Client) -> None:
    config = tmp_path / "server.toml"
    config.write_text("slow_client_s = 100\n")
    options = (*SMALL, "--config", str(config))
    prefix = ("prlimit", f"--nofile={NUM_FILES}:{NUM_FILES}")
    with running_env_server(tmp_path, *options, images=images, prefix=prefix) as server:
        client = Client(http_to, server.url)
        assert client.episode() == 1.0
        parts = urlsplit(server.url)
        crowd = [socket.create_connection((str(parts.hostname), int(parts.port or 0))) for _ in range(2 * NUM_FILES)]
        try:
            assert client.episode() == 1.0
            answered = select.select(crowd, [], [], 0)[0]
            assert NUM_FILES // 2 - 3 < len(crowd) - len(answered) < NUM_FILES // 2
            heads = [head for head in (received(one) for one in answered) if head]
            assert {head.split()[1] for head in heads} == {b"503"}
            assert len(heads) > 20
        finally:
            for one in crowd:
                one.close()
        client.until_it_works()
        check_stop(server)


def received(one: socket.socket) -> bytes:
    """The received bytes; empty if the connection was reset."""
    try:
        return one.recv(4096)
    except ConnectionError:
        return b""


@pytest.fixture(scope="module")
def walled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose folders can be filled."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount file systems")
    folder = tmp_path_factory.mktemp("walled")
    state = folder / "state"
    state.mkdir()
    with running_env_server(
        folder, *IMPATIENT, "--download-host", "127.0.0.1", images=state, prefix=in_namespace(WALLED),
        variables={"STATE": str(state)},
    ) as server:  # fmt: skip
        yield server
        check_stop(server)


def in_namespace(script: str) -> tuple[str, ...]:
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh")


def inside(server: RunningServer, script: str) -> None:
    """Runs a shell script where the server's folders are mounted."""
    folders = {"TMPDIR": str(server.temporary), "STATE": str(server.state_dir)}
    command = ["nsenter", "-t", str(server.process.pid), "-m", "sh", "-c", script]
    subprocess.run(command, check=True, env=os.environ | folders, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("break_it", "mend_it", "reason"),
    [
        ('mount -o remount,bind,ro "$TMPDIR"', 'mount -o remount,bind,rw "$TMPDIR"', "Read-only file system"),
        (
            'mount -t tmpfs -o nr_inodes=2 full "$TMPDIR" && touch "$TMPDIR/full"',
            'umount "$TMPDIR"',
            "No space left on device",
        ),
    ],
    ids=["read-only", "full"],
)
def test_a_temporary_folder_that_accepts_no_files_is_reported_and_the_server_recovers(
    walled: RunningServer, http_to: httpx.Client, break_it: str, mend_it: str, reason: str
) -> None:
    client = Client(http_to, walled.url)
    client.until_it_works()
    begin = len(walled.log.read_text())
    episode_id = client.begin()
    inside(walled, break_it)
    try:
        assert client.post("/evaluate", episode_id=episode_id)[1]["reward"] == 1.0
        client.post("/close", episode_id=episode_id)
        reported = client.reset()
        assert (reported[0], reported[1]["fault"]) == (503, "no_capacity"), reported
    finally:
        inside(walled, mend_it)
    client.until_it_works()
    log = walled.log.read_text()[begin:]
    assert "this machine cannot start the desktop" in log
    assert reason in log


def test_a_full_state_disk_fails_downloads_and_nothing_else(walled: RunningServer, http_to: httpx.Client) -> None:
    client = Client(http_to, walled.url)
    with file_server() as url:
        download = {"type": "download", "parameters": {"files": [{"url": url, "path": "/tmp/downloaded"}]}}
        config = dict(TASK.config) | {"config": [download, *TASK.config["config"]]}
        inside(walled, 'cat /dev/zero > "$STATE/full" || true')
        try:
            reported = client.when_free(config)
            assert isinstance(reported, tuple), reported
            assert (reported[0], reported[1]["fault"]) == (500, "env_fault"), reported
            assert "cannot be kept on this server: No space left on device" in reported[1]["error"]
            client.until_it_works()
        finally:
            inside(walled, 'rm "$STATE/full"')
        assert client.when_free(config) == 1.0


@contextmanager
def file_server() -> Iterator[str]:
    """Serves a file of one megabyte, and yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 20))
            self.end_headers()
            self.wfile.write(b"x" * (1 << 20))

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/file"
    finally:
        server.shutdown()
        server.server_close()


def test_a_full_shared_memory_disturbs_no_episode(walled: RunningServer, http_to: httpx.Client) -> None:
    inside(walled, "! echo more > /dev/shm/more")
    Client(http_to, walled.url).until_it_works()


def test_a_server_that_starts_on_a_full_state_disk_ends_with_one_sentence(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount file systems")
    done = subprocess.run(
        [*in_namespace(FULL_FROM_THE_START), sys.executable, "-m", "env_server.main", "--port", "0",
         "--state-dir", str(tmp_path), *SMALL],
        env=os.environ | {"STATE": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("env-server: cannot make the desktop image")
    assert "No space left on device" in last


ATTACK = "pyautogui.moveTo(5, 5)"
HOGS = """
import os, time
from Xlib.display import Display
root = Display().screen().root
while root.query_pointer().root_x != 5:
    time.sleep(0.1)
for _ in range(100):
    if os.fork() == 0:
        hoard = bytearray(7 << 20)
        for at in range(0, len(hoard), 4096):
            hoard[at] = 1
        time.sleep(20)
"""


@contextmanager
def little_memory(num_bytes: int) -> Iterator[tuple[str, ...]]:
    """The prefix of a command that shares `num_bytes` of memory with all processes that it starts."""
    lines = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, names, path in lines if names == "memory"), None)
    base = Path("/sys/fs/cgroup/memory", str(own).lstrip("/"))
    if own is None or os.geteuid() != 0 or not (base / "memory.limit_in_bytes").exists():
        pytest.skip("this machine lets no control group of version 1 be made")
    group = base / f"osworld-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(num_bytes))
        yield ("sh", "-c", f'echo 0 > {group}/cgroup.procs; exec "$@"', "sh")
    finally:
        until = time.monotonic() + 10
        while group.exists():
            try:
                group.rmdir()
            except OSError:
                assert time.monotonic() < until, "processes are left in it"
                time.sleep(0.1)


def test_a_desktop_killed_by_lack_of_memory_on_the_machine_is_a_fault_and_not_tampering(
    tmp_path: Path, images: Path, http_to: httpx.Client
) -> None:
    hogs = {"type": "launch", "parameters": {"command": ["python3", "-c", HOGS]}}
    config = dict(TASK.config) | {"config": [hogs, *TASK.config["config"]]}
    with (
        little_memory(500 << 20) as prefix,
        running_env_server(tmp_path, *SMALL, "--desktop-memory-mb", "2048", images=images, prefix=prefix) as server,
    ):
        client = Client(http_to, server.url)
        status, fields = client.reset(config)
        assert status == 200, fields
        reported: dict[str, Any] = {}
        until = time.monotonic() + 30
        while status == 200:
            assert time.monotonic() < until, "the desktop lives"
            status, reported = client.post("/step", episode_id=fields["episode_id"], action=ATTACK, pause=0.1)
        assert (status, reported["fault"]) == (500, "env_fault"), reported
        client.post("/close", episode_id=fields["episode_id"])
        client.until_it_works()
        check_stop(server)


def test_a_clock_that_steps_back_an_hour_ends_no_episode(tmp_path: Path, images: Path, http_to: httpx.Client) -> None:
    shim, stepped = tmp_path / "clock_shim.so", tmp_path / "stepped"
    source = Path(__file__).with_name("clock_shim.c")
    built = subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    variables = {"LD_PRELOAD": str(shim), "CLOCK_SHIM_FILE": str(stepped)}
    config = tmp_path / "server.toml"
    config.write_text("idle_ttl_s = 30\n")
    with running_env_server(
        tmp_path, *SMALL, "--access-log", "--config", str(config), images=images, variables=variables
    ) as server:
        client = Client(http_to, server.url)
        episode_id = client.begin()
        before = server.log.read_text().splitlines()[0][:19]
        stepped.touch()
        status, reported = client.post("/step", episode_id=episode_id, action="pyautogui.press('a')", pause=0.1)
        assert status == 200, reported
        assert client.post("/evaluate", episode_id=episode_id)[1]["reward"] == 1.0
        client.post("/close", episode_id=episode_id)
        assert client.episode() == 1.0
        stamps = [line[:19] for line in server.log.read_text().splitlines() if line[:2] == "20"]
        # The log line of the reset may come after its answer, so no count of lines shows where the step back starts.
        after = list(dropwhile(lambda stamp: stamp >= before, stamps))
        assert after, "the server's clock has not gone back"
        assert all(stamp < before for stamp in after), "the server's clock went on"
        check_stop(server)
