"""What a local desktop cannot do to its host, and how it runs where no sandbox is possible."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from env_server.providers import cpu_shares
from env_server.providers.bounds import DEFAULT_CPU_WEIGHTS, Bounds, DesktopLimits
from env_server.providers.cpu_shares import SMALL_WEIGHT, share_cpus
from env_server.providers.host_users import HostUsers
from env_server.providers.local import provider as local
from env_server.providers.local.provider import LocalDesktop, LocalProvider
from env_server.providers.sandbox import PROGRAM_NICE
from osworld_pipeline.errors import DependencyError, ReplicaError

pytestmark = pytest.mark.desktop
REPOSITORY = Path(__file__).parents[2]
UNPRIVILEGED_UID = 65_534

_HOG = """
import os, sys
megabytes, num_processes = map(int, sys.argv[1:])
for index in range(num_processes):
    if num_processes == 1 or os.fork() == 0:
        hoard = bytearray(megabytes << 20)
        for at in range(0, len(hoard), 4096):
            hoard[at] = 1
        import time
        time.sleep(30)
"""


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(images=tmp_path, screen_size=(800, 600), memory_mb=512, max_processes=200)
    try:
        yield provider
    finally:
        await provider.close()


async def bounded(provider: LocalProvider) -> LocalDesktop:
    desktop = await provider.start("replica-0")
    if not provider.details.startswith("control group"):
        pytest.skip(f"this machine: {provider.details}")
    return desktop


async def test_a_program_that_takes_too_much_memory_dies_and_its_desktop_stays_alive(provider: LocalProvider) -> None:
    desktop = await bounded(provider)
    done = await desktop.guest.execute(["python3", "-c", _HOG, "2000", "1"], timeout_s=30)
    assert done.returncode == -9
    filled = "cat /dev/zero > /tmp/a; cat /dev/zero > /dev/shm/a; cat /dev/zero > ~/a; ls -l ~/a"
    assert (await desktop.guest.execute(filled, shell=True)).returncode == 0
    assert await desktop.guest.screenshot()


async def overfill(desktop: LocalDesktop) -> None:
    """Fills the memory with many programs, each smaller than the X server, which is therefore killed first."""
    await desktop.guest.execute(["python3", "-c", _HOG, "25", "100"], timeout_s=20)
    for _ in range(100):
        await desktop.guest.screenshot(timeout_s=5)
        await asyncio.sleep(0.1)


async def test_a_desktop_that_exceeds_its_memory_as_a_whole_is_a_fault_and_comes_back(provider: LocalProvider) -> None:
    desktop = await bounded(provider)
    with pytest.raises(ReplicaError):
        await overfill(desktop)
    started = time.monotonic()
    await desktop.reset()
    assert time.monotonic() - started < 5
    assert await desktop.guest.platform() == "Linux"


async def test_all_processes_of_a_desktop_are_counted_including_those_of_root(provider: LocalProvider) -> None:
    desktop = await bounded(provider)
    bomb = "import os, time\nn = 0\ntry:\n  while os.fork(): n += 1\n  time.sleep(60)\nexcept OSError: print(n)\n"
    done = await desktop.guest.execute(
        f"echo password | sudo -S true; sudo python3 -c '{bomb}'", shell=True, timeout_s=30
    )
    assert 20 < int(done.output) < 200


_SPIN = """
import os, resource, sys, time
num_sessions, seconds = int(sys.argv[1]), float(sys.argv[2])
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(num_sessions):
    if os.fork() == 0:
        os.setsid()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass
        os._exit(0)
for _ in range(num_sessions):
    os.wait()
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""
"""Sessions that take one and the same processor; prints the CPU time that they got."""


async def spin(desktop: LocalDesktop, *, num_sessions: int, seconds: float) -> float:
    """Spins in `num_sessions` sessions, and returns the seconds of CPU time."""
    argv = ["python3", "-c", _SPIN, str(num_sessions), str(seconds)]
    return float((await desktop.guest.execute(argv, timeout_s=60)).output)


async def two_weighed(provider: LocalProvider) -> tuple[LocalDesktop, LocalDesktop]:
    desktops = await bounded(provider), await provider.start("replica-1")
    if "an equal share of CPU time" not in provider.details:
        pytest.skip(f"this machine: {provider.details}")
    return desktops


async def test_a_desktop_next_to_many_spinning_sessions_gets_a_fair_share_of_cpu_time(provider: LocalProvider) -> None:
    hostile, neighbour = await two_weighed(provider)
    taken_s, left_s = await asyncio.gather(
        spin(hostile, num_sessions=40, seconds=0.8), spin(neighbour, num_sessions=1, seconds=0.8)
    )
    assert left_s > taken_s / 4


async def test_a_desktop_that_spins_next_to_idle_ones_gets_only_the_cpu_time_that_they_leave(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_shares, "FLOOR_CPUS", 0.05)  # other tests may use the rest of this machine
    hostile, neighbour = await two_weighed(provider)
    groups = [group for group in (hostile.group, neighbour.group) if group is not None]
    sharing = asyncio.create_task(share_cpus(lambda: groups, interval_s=0.3))
    spinning = asyncio.create_task(spin(hostile, num_sessions=1, seconds=2.0))
    try:
        async with asyncio.timeout(20):
            while not any(map(has_small_weight, groups[0].folders)):  # noqa: ASYNC110 - the kernel sends no event
                await asyncio.sleep(0.02)
        sharing.cancel()
        began_s = groups[0].cpu_time_s() or 0.0
        left_s = await spin(neighbour, num_sessions=1, seconds=0.4)
        assert left_s > 2 * ((groups[0].cpu_time_s() or 0.0) - began_s)
    finally:
        sharing.cancel()
        await spinning


def has_small_weight(folder: Path) -> bool:
    return any(
        (folder / name).exists() and int((folder / name).read_text()) == round(weight * SMALL_WEIGHT)
        for name, weight in DEFAULT_CPU_WEIGHTS.items()
    )


async def test_the_agent_has_priority_over_the_programs_of_its_desktop_and_root_cannot_change_that(
    provider: LocalProvider,
) -> None:
    desktop = await bounded(provider)
    as_root = "echo password | sudo -S sh -c"
    changed = await desktop.guest.execute(f"{as_root} 'renice -n -5 $$; nice'; renice -n 0 $$; nice", shell=True)
    assert changed.output.split() == [str(PROGRAM_NICE)] * 2
    of_agent = "cut -d ' ' -f 19 /proc/1/stat; ps -C Xvfb -o nice="
    assert (await desktop.guest.execute(of_agent, shell=True)).output.split() == ["0", "0"]


async def test_a_quota_of_cpu_time_holds_on_an_idle_machine(tmp_path: Path) -> None:
    probe = Bounds.open(DesktopLimits())
    probe.close()
    if not probe.shares_cpu:
        pytest.skip(f"this machine: {probe.description}")
    provider = LocalProvider(images=tmp_path, screen_size=(640, 480), max_cpus=0.2)
    try:
        desktop = await provider.start("replica-0")
        assert await spin(desktop, num_sessions=2, seconds=0.6) < 0.6 * 0.2 * 2
    finally:
        await provider.close()


async def test_a_quota_that_cannot_be_enforced_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.Bounds, "open", lambda limits: Bounds(limits, version=0, bases=(), why_not="none here"))
    provider = LocalProvider(images=tmp_path, screen_size=(640, 480), max_cpus=0.2)
    with pytest.raises(DependencyError, match=r"local.max_cpus cannot be enforced here .*none here"):
        await provider.start("replica-0")
    await provider.close()


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="no filter for this machine")
async def test_system_calls_that_no_desktop_needs_are_denied_to_user_and_root(provider: LocalProvider) -> None:
    guest = (await provider.start("replica-0")).guest
    code = (
        "import ctypes, os, osworld_guest.seccomp as s; c = ctypes.CDLL(None, use_errno=True).syscall; "
        "column = s._MACHINES[os.uname().machine][0]; "
        "print(*[c(n[column], 0, 0, 0, 0, 0) or ctypes.get_errno() for n in s.DENIED.values() if n[column]], "
        "{ctypes.get_errno()})"
    )
    for sudo in ("", "echo password | sudo -S "):
        done = await guest.execute(f'{sudo}python3 -c "{code}"', shell=True)
        answers = set(done.output.split())
        assert answers == {"-1", "{1}"}, done
    assert "Seccomp:\t2" in (await guest.execute("sudo cat /proc/self/status", shell=True)).output
    assert (await guest.execute("sudo touch /etc/a && sudo rm /etc/a", shell=True)).returncode == 0


_PLAIN_HOST = """
import asyncio, sys
from pathlib import Path
from env_server.guest_client import GuestCall
from env_server.providers.local.provider import LocalProvider

async def main():
    provider = LocalProvider(images=Path(sys.argv[1]), screen_size=(640, 480), allow_unsandboxed=sys.argv[2] == "yes")
    digest = provider.image_digest
    desktop = await provider.start("plain")
    guest = desktop.guest
    await guest.launch(["xterm"])
    await guest.activate_window("xterm", by_class=True)
    async with asyncio.timeout(30):
        while await guest.file("answer") != b"42\\n":
            # Typed again, because a terminal under load may not have had the focus yet.
            await guest.act([GuestCall(name="write", args=("echo $((6*7)) > answer\\n",))])
            await asyncio.sleep(1)
    print("answered", (await guest.execute(["id", "-u"])).output.strip(), digest != provider.image_digest)
    await desktop.reset()
    print("forgotten", await desktop.guest.file("answer"), flush=True)
    await asyncio.sleep(float(sys.argv[3]))
    await provider.close()

asyncio.run(main())
"""


@pytest.fixture
def plain_host(tmp_path: Path) -> list[str]:
    """A command that runs as an ordinary user on a machine that allows no namespaces."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user here")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    unprivileged = ("setpriv", f"--reuid={UNPRIVILEGED_UID}", f"--regid={UNPRIVILEGED_UID}", "--clear-groups")
    no_namespaces = ("bwrap", "--unshare-user", "--disable-userns", "--die-with-parent", "--dev-bind", "/", "/")
    environment = ("env", "-i", "PATH=/usr/bin:/bin", f"PYTHONPATH={REPOSITORY}:{packages}")
    if subprocess.run([*unprivileged, "test", "-r", f"{packages}/httpx/__init__.py"], check=False).returncode:
        pytest.skip("this environment is hidden from other users")
    if subprocess.run([*unprivileged, *no_namespaces, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this bubblewrap cannot forbid namespaces")
    python = [*environment, *unprivileged, *no_namespaces, "/usr/bin/python3", "-B"]
    version = subprocess.run([*python, "-c", "import httpx"], capture_output=True, check=False)
    if version.returncode:
        pytest.skip("the system's Python cannot load this environment's packages")
    return [*python, "-c", _PLAIN_HOST]


def left_of_unprivileged_user() -> tuple[list[str], list[str]]:
    """Running processes of the unprivileged user, and folders of its desktops."""
    listing = subprocess.run(
        ["ps", "-u", str(UNPRIVILEGED_UID), "-o", "stat=,args="], capture_output=True, text=True, check=False
    ).stdout
    running = [line for line in listing.splitlines() if not line.startswith("Z")]
    return running, [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("desktop-plain-")]


def await_end(before: tuple[list[str], list[str]]) -> None:
    until = time.monotonic() + 10
    while left_of_unprivileged_user() != before:
        assert time.monotonic() < until, left_of_unprivileged_user()
        time.sleep(0.1)


def test_without_namespaces_a_desktop_runs_only_where_that_is_allowed_and_leaves_nothing(plain_host: list[str]) -> None:
    before = left_of_unprivileged_user()
    with tempfile.TemporaryDirectory() as images:
        os.chown(images, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
        refused = subprocess.run(
            [*plain_host, images, "no", "0"], capture_output=True, text=True, timeout=60, check=False, cwd="/"
        )
        assert refused.returncode == 1
        assert "DependencyError: bubblewrap cannot make a sandbox here" in refused.stderr
        done = subprocess.run(
            [*plain_host, images, "yes", "0"], capture_output=True, text=True, timeout=60, check=False, cwd="/"
        )
        assert done.stdout.splitlines() == [f"answered {UNPRIVILEGED_UID} True", "forgotten None"], done.stderr[-2000:]
        assert "DESKTOPS WITHOUT A SANDBOX" in done.stderr
        await_end(before)
        with subprocess.Popen(
            [*plain_host, images, "yes", "60"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd="/"
        ) as host:
            try:
                assert host.stdout is not None
                assert [host.stdout.readline() for _ in range(2)][1] == "forgotten None\n"
                assert len(left_of_unprivileged_user()[0]) > len(before[0]) + 5
            finally:
                # Leaving the block waits for the process, without a limit.
                host.kill()
        await_end(before)


async def test_root_never_runs_a_desktop_without_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("this is no root")

    def forbid(image: Path, users: HostUsers) -> None:
        raise DependencyError("no namespaces here")

    monkeypatch.setattr(local, "check_namespaces", forbid)
    provider = LocalProvider(images=tmp_path, screen_size=(640, 480), allow_unsandboxed=True)
    with pytest.raises(DependencyError, match="start the env server as another user"):
        await provider.start("plain")
    await provider.close()
