"""A hostile policy on a local desktop, with and without sudo: the guest agent keeps answering, and graders are not
deceived."""

import asyncio
import base64
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from env_server_process import desktops_below
from fault_load import first_inside, program_inside
from freezer import frozen
from hostile_programs import BOMB, FILL, IN_FLIGHT

from env_server.evaluators.episode_cache import EpisodeCache
from env_server.guest_client import GuestClient
from env_server.providers.local.provider import LocalDesktop, LocalProvider
from osworld_pipeline.errors import ReplicaError, TamperingError
from osworld_pipeline.task_schema.context import CommandResult
from osworld_pipeline.task_schema.getters import vm_command_line

pytestmark = pytest.mark.desktop

SUDO = "echo password | sudo -S "
ATTACKS = """
import contextlib, ctypes, os, resource, signal

def tried(name, attack):
    try:
        print(name, "done" if attack() in (None, 0) else "refused")
    except OSError:
        print(name, "refused")

for file in ("mem", "environ", "maps", "auxv"):
    tried(file, lambda: open(f"/proc/1/{file}", "rb").read(1) and None)
tried("writing mem", lambda: os.close(os.open("/proc/1/mem", os.O_WRONLY)))
for file in ("fd/0", "exe", "root", "ns/user", "map_files"):
    tried(file, lambda: (os.listdir if file == "map_files" else os.readlink)(f"/proc/1/{file}") and None)
call = ctypes.CDLL(None, use_errno=True).syscall
tried("ptrace", lambda: call(101, 16, 1, 0, 0))
tried("process_vm_writev", lambda: call(311, 1, 0, 0, 0, 0, 0))
tried("pidfd_getfd", lambda: call(438, os.pidfd_open(1), 0, 0))
tried("limits", lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)) and None)
tried("priority", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
tried("scheduler", lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
tried("affinity", lambda: os.sched_setaffinity(1, {0}))
for number in set(signal.Signals):
    with contextlib.suppress(OSError):
        os.kill(1, number)
for _ in range(3000):
    os.kill(1, signal.SIGCHLD)
"""
KILL_THE_HELPER = "pkill -KILL -f [o]sworld_guest.init"


@pytest.fixture
async def guest(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GuestClient]:
    provider = LocalProvider(images=_images(tmp_path_factory), screen_size=(640, 480))
    try:
        yield (await provider.start("replica-0")).guest
    finally:
        await provider.close()


def _images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "images-of-hostile-policies"


async def run_inside(guest: GuestClient, program: str, *, sudo: bool) -> CommandResult:
    encoded = base64.b64encode(program.encode()).decode()
    await guest.execute(f"echo {encoded} | base64 -d > /tmp/program.py", shell=True)
    return await guest.execute(f"{SUDO if sudo else ''}python3 /tmp/program.py", shell=True)


async def grade(guest: GuestClient) -> tuple[str, bytes | None]:
    """The requests of a grader: for a file that does not exist, and for one that exists."""
    reported = await guest.execute("cat /home/user/answer; cat /home/user/question", shell=True)
    return reported.output, await guest.file("/home/user/answer")


@pytest.mark.parametrize("sudo", [False, True], ids=["user", "root"])
async def test_desktop_programs_cannot_stop_kill_slow_or_read_the_agent(guest: GuestClient, sudo: bool) -> None:
    await guest.upload("/home/user/question", b"what?\n")
    reported = await run_inside(guest, ATTACKS, sudo=sudo)
    answers = [line.rpartition(" ")[2] for line in reported.output.splitlines()]
    assert answers == ["refused"] * 17, reported
    async with asyncio.timeout(10):
        assert await grade(guest) == ("what?\n", None)
        assert len(await guest.screenshot()) > 1000
        assert (await guest.execute("exit 7", shell=True)).returncode == 7


async def test_killing_the_sudo_helper_disables_only_sudo(guest: GuestClient) -> None:
    await guest.execute(KILL_THE_HELPER, shell=True)
    refused = await guest.execute(f"{SUDO}id", shell=True, timeout_s=10)
    assert (refused.returncode, refused.output) == (1, ""), refused
    assert await grade(guest) == ("", None)


async def test_screenshots_show_the_screen_after_its_shared_memory_was_removed(guest: GuestClient) -> None:
    removed = await guest.execute("ipcs -m; ipcrm --all=shm; ipcs -m", shell=True)
    assert removed.output.count(" dest ") >= 1, removed.output
    before = await guest.screenshot()
    await guest.launch(["xterm"])
    await guest.activate_window("xterm", by_class=True)
    after = await guest.screenshot()
    assert after != before
    assert len(after) > 1000


@pytest.mark.parametrize(
    "trick",
    [
        "mkfifo",
        "ln -s /dev/zero",
        "truncate -s 900M",
        "mkdir",
        "ln -s /home/user/terminal.txt",
        "install -m 0 /dev/null",
    ],
)
async def test_a_replaced_terminal_file_does_not_block_the_agent(guest: GuestClient, trick: str) -> None:
    await guest.launch(["xterm"])
    await guest.activate_window("xterm", by_class=True)
    keep = f"while :; do rm -f /run/user/1000/terminal.txt; {trick} /run/user/1000/terminal.txt; done"
    await guest.launch(keep, shell=True)
    async with asyncio.timeout(10):
        for _ in range(3):
            assert len(await guest.terminal() or "") <= 256 << 10
        assert await guest.platform() == "Linux"


async def test_a_killed_or_stopped_accessibility_helper_does_not_block_the_agent(guest: GuestClient) -> None:
    assert "desktop-frame" in await guest.accessibility()
    await guest.execute("pkill -KILL -f [o]sworld_guest.accessibility", shell=True)
    assert "desktop-frame" in await guest.accessibility()
    await guest.execute("pkill -STOP -f [o]sworld_guest.accessibility", shell=True)
    asking = asyncio.create_task(guest.accessibility(timeout_s=2))
    assert await grade(guest) == ("", None)
    await asyncio.wait({asking})
    assert asking.exception() is not None


async def until_idle(guest: GuestClient, program: str) -> None:
    used_time = f"cut -d' ' -f14,15 /proc/$(pidof {program})/stat"
    async with asyncio.timeout(60):
        before = await guest.execute(used_time, shell=True)
        while True:
            await asyncio.sleep(1)
            now = await guest.execute(used_time, shell=True)
            if now.output and now.output == before.output:
                return
            before = now


async def until_dead(desktop: LocalDesktop, *, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while desktop.is_alive():
        assert time.monotonic() < end, f"it lives after {limit_s:g} s"
        await asyncio.sleep(0.1)


UNUSABLE = {
    "ends the X server": "pkill -TERM Xvfb",
    "kills the X server": "pkill -KILL Xvfb",
    "stops the X server": "pkill -STOP Xvfb",
    "grabs the X server": 'python3 -c "from Xlib.display import Display; import time; d = Display(); d.grab_server(); '
    'd.sync(); time.sleep(600)"',
    "fills its memory": "python3 -c \"import os; [os.fork() for _ in range(4)]; [b'x' * 10**6 for _ in range(9999)]\"",
}


@pytest.fixture
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(images=_images(tmp_path_factory), screen_size=(640, 480), memory_mb=300)
    try:
        yield provider
    finally:
        await provider.close()


@pytest.mark.parametrize("command", UNUSABLE.values(), ids=UNUSABLE)
async def test_disabling_the_desktop_from_inside_is_tampering(provider: LocalProvider, command: str) -> None:
    desktop = await provider.start("replica-0")
    if "9999" in command and "control group" not in provider.details:
        pytest.skip(f"memory has no bound here: {provider.details}")
    await desktop.guest.launch(command, shell=True)
    await until_dead(desktop, limit_s=40)
    assert "replica-0" in (await desktop.cause_inside() or "")
    await desktop.stop()
    assert "replica-0" in (await desktop.cause_inside() or "")


async def test_the_cause_is_read_when_a_desktop_that_takes_long_to_end_has_ended(
    provider: LocalProvider,
) -> None:
    desktop = await provider.start("replica-0")
    (bubblewrap,) = desktops_below(os.getpid())
    await desktop.guest.execute("sleep 600 > /dev/null 2>&1 &", shell=True)
    async with asyncio.timeout(10):
        while not (sleeping := program_inside(bubblewrap, "sleep")):  # noqa: ASYNC110 - first it is a copy of the shell
            await asyncio.sleep(0.02)
    await desktop.guest.launch("pkill -KILL Xvfb", shell=True)
    with frozen(sleeping):
        with pytest.raises(ReplicaError):
            await ask_until_refused(lambda _: desktop.guest.platform())
        asking = asyncio.create_task(desktop.cause_inside())
        await asyncio.sleep(2.5)
        assert desktop.is_alive()
    assert "replica-0" in (await asking or "")


async def test_a_desktop_killed_from_outside_or_under_load_is_not_tampering(provider: LocalProvider) -> None:
    killed, stopped, busy = [await provider.start(name) for name in ("killed", "stopped", "busy")]
    await busy.guest.launch("for i in 1 2 3 4; do (while :; do :; done) & done; xterm", shell=True)
    os.kill(first_inside(desktops_below(os.getpid())[0]) or 0, signal.SIGKILL)
    await until_dead(killed, limit_s=10)
    await stopped.stop()
    await asyncio.sleep(15)
    assert busy.is_alive()
    assert [await one.cause_inside() for one in (killed, stopped, busy)] == [None] * 3


async def ask_until_refused(ask: Callable[[int], Awaitable[object]]) -> None:
    async with asyncio.timeout(40):
        for number in itertools.count():
            await ask(number)
            await asyncio.sleep(0.1)


async def test_file_descriptors_in_flight_do_not_disturb_another_desktop(provider: LocalProvider) -> None:
    if os.geteuid() != 0:
        pytest.skip("desktops have host users of their own only where the server is root")
    hostile, neighbour = [(await provider.start(f"replica-{number}")).guest for number in range(2)]
    await hostile.upload("/tmp/in_flight.py", IN_FLIGHT.encode())
    await hostile.launch("python3 /tmp/in_flight.py > /tmp/held", shell=True)
    async with asyncio.timeout(20):
        while b"Too many references" not in (await hostile.file("/tmp/held") or b""):  # noqa: ASYNC110 - in a desktop
            await asyncio.sleep(0.1)
    done = await neighbour.execute(f"{SUDO}id -u", shell=True, timeout_s=10)
    assert (done.returncode, done.output) == (0, "0\n"), done


async def test_exhausting_processes_is_tampering(provider: LocalProvider) -> None:
    guest = (await provider.start("replica-0")).guest
    await guest.launch(["python3", "-c", BOMB])
    with pytest.raises(TamperingError, match=r"replica-0 have left no space or processes for /execute"):
        await ask_until_refused(lambda _: guest.execute("true", shell=True))


async def test_exhausting_threads_is_tampering(
    provider: LocalProvider,
) -> None:
    guest = (await provider.start("replica-0")).guest
    await guest.launch(["python3", "-c", BOMB])
    with pytest.raises(TamperingError):
        await ask_until_refused(lambda _: guest.execute("true", shell=True))
    with pytest.raises(TamperingError, match=r"replica-0 have left no space or processes for /platform"):
        # Each concurrent call needs a connection, and each new connection needs a thread.
        await ask_until_refused(lambda _: asyncio.gather(*(guest.platform() for _ in range(20))))


async def test_filling_the_disks_is_tampering(provider: LocalProvider) -> None:
    guest = (await provider.start("replica-0")).guest
    await guest.launch(FILL, shell=True)
    with pytest.raises(TamperingError, match=r"replica-0 have left no space or processes for /setup/upload"):
        await ask_until_refused(lambda number: guest.upload(f"/home/user/{number}", b"x" * 2_000_000))


LIE = "import os; os.write(1, b'solved'); os._exit(0)"
BEFORE_CAT = "printf '#!/bin/sh\\necho solved' > /usr/local/bin/cat; chmod +x /usr/local/bin/cat"
STAND_INS = {
    "a program before the system's": BEFORE_CAT,
    "a library in every program": "echo /tmp/lie.so > /etc/ld.so.preload",
    "code that every Python runs": "for d in /usr/local/lib/python3.*/*-packages; do touch $d/sitecustomize.py; done",
    "another program in a shipped one's place": "ln -sf /usr/bin/true /usr/local/bin/python",
}


@pytest.mark.parametrize("command", STAND_INS.values(), ids=STAND_INS)
async def test_overriding_a_graders_programs_as_root_is_tampering(guest: GuestClient, command: str) -> None:
    assert (await guest.execute("cat /etc/hostname", shell=True, is_graders=True)).output == "desktop\n"
    await guest.upload("/home/user/program.sh", command.encode())
    done = await guest.execute(f"{SUDO}sh /home/user/program.sh", shell=True)
    assert done.returncode == 0, done
    with pytest.raises(TamperingError, match="overrides the system's own"):
        await guest.execute("cat /etc/hostname", shell=True, is_graders=True)


async def test_user_site_packages_do_not_affect_grader_commands(guest: GuestClient) -> None:
    folder = (await guest.execute(["python3", "-m", "site", "--user-site"])).output.strip()
    await guest.upload(f"{folder}/usercustomize.py", LIE.encode())
    asked = ["python3", "-c", "print('not solved')"]
    assert (await guest.execute(asked)).output == "solved", "or this test would prove nothing"
    assert (await guest.execute(asked, is_graders=True)).output == "not solved\n"


async def test_installing_a_program_is_not_tampering(guest: GuestClient) -> None:
    await guest.upload("/home/user/new-tool", b"#!/bin/sh\necho tool\n")
    install = "install -m 755 /home/user/new-tool /usr/local/bin/new-tool"
    assert (await guest.execute(f"{SUDO}{install}", shell=True)).returncode == 0
    write_bytecode = (
        "sudo python3 -O -c 'import pyautogui' && ls /usr/local/lib/python3*/dist-packages/__pycache__/*opt-1*"
    )
    assert (await guest.execute(write_bytecode, shell=True)).returncode == 0
    assert (await guest.execute("new-tool", shell=True, is_graders=True)).output == "tool\n"


SESSION_BUS = "[d]bus-daemon --session"
SILENT_BUS = """
import os, socket, time
path = "/run/user/1000/bus"
os.unlink(path)
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen(64)
time.sleep(600)
"""
READER = "pkill -KILL -f [o]sworld_guest.accessibility"
OTHERS = f"pkill -KILL at-spi; pkill -KILL -f [a]ccessibility.conf; {READER}"
"""What reads the tree needs the message bus to find the one of accessibility, and no more after that."""
NO_TREE = {
    "ends the message bus": f"pkill -KILL -f '{SESSION_BUS}'; {OTHERS}",
    "stops the message bus": f"pkill -STOP -f '{SESSION_BUS}'; {OTHERS}",
    "stops it again and again": f"{OTHERS}; while :; do pkill -STOP -f '{SESSION_BUS}'; sleep 1; "
    f"pkill -CONT -f '{SESSION_BUS}'; done",
    "takes its socket's place": f'{OTHERS}; python3 -c "{SILENT_BUS}"',
    "stops the bus of accessibility": f"pkill -STOP -f [a]ccessibility.conf; {READER}",
    "ends what reads the tree": f"while :; do {READER}; done",
    "stops what reads the tree": "while :; do pkill -STOP -f [o]sworld_guest.accessibility; sleep 0.05; done",
}


@pytest.mark.parametrize("command", NO_TREE.values(), ids=NO_TREE)
async def test_disabling_the_accessibility_tree_is_tampering(provider: LocalProvider, command: str) -> None:
    guest = (await provider.start("replica-0")).guest
    await guest.launch(["mousepad"])
    async with asyncio.timeout(20):
        while "mousepad" not in await guest.accessibility():  # noqa: ASYNC110 - in a desktop
            await asyncio.sleep(0.1)
    await guest.launch(command, shell=True)
    with pytest.raises(TamperingError, match=r"replica-0 have disabled the services behind /accessibility"):
        await ask_until_refused(lambda _: guest.accessibility(timeout_s=20))
    assert await guest.platform() == "Linux"


async def test_a_slow_desktop_or_a_stopped_program_without_a_tree_is_not_tampering(provider: LocalProvider) -> None:
    guest = (await provider.start("replica-0")).guest
    await guest.launch(["mousepad"])
    await guest.activate_window("mousepad", by_class=True)
    await until_idle(guest, "mousepad")  # while it starts it grabs the X server, and a lasting grab ends the desktop
    await guest.launch("pkill -STOP mousepad; for i in 1 2; do (while :; do :; done) & done", shell=True)
    assert "desktop-frame" in await guest.accessibility(timeout_s=60)


async def test_killing_the_graders_command_is_tampering(guest: GuestClient) -> None:
    await guest.launch("while :; do pkill -KILL -x sleep; done", shell=True)
    with pytest.raises(TamperingError, match="was killed in its desktop"):
        await vm_command_line(guest, EpisodeCache(), command="sleep 20", shell=True)
