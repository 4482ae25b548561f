"""The real local desktop: real programs in a real sandbox, used through the guest protocol."""

import asyncio
import io
import os
import signal
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from env_server_process import is_running
from PIL import Image

from env_server.guest_client import GuestCall, GuestClient
from env_server.providers.local.provider import LocalDesktop, LocalProvider
from osworld_pipeline.errors import ActionParseError, ReplicaError, SetupError

pytestmark = pytest.mark.desktop
REPOSITORY = Path(__file__).parents[2]
ORDINARY_UID = 54_321
WAIT_LIMIT_S = 15.0


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture
async def desktop(images: Path) -> AsyncIterator[LocalDesktop]:
    provider = LocalProvider(images=images, screen_size=(1024, 768))
    try:
        yield await provider.start("replica-0")
    finally:
        await provider.close()


@pytest.fixture
async def guest(desktop: LocalDesktop) -> GuestClient:
    return desktop.guest


def call(name: str, *args: object, **kwargs: object) -> GuestCall:
    return GuestCall(name=name, args=args, kwargs=kwargs)


async def until(question: Callable[[], Awaitable[bool]], what: str) -> None:
    end = time.monotonic() + WAIT_LIMIT_S
    while not await question():
        assert time.monotonic() < end, f"{what} did not happen within {WAIT_LIMIT_S:g} s"
        await asyncio.sleep(0.05)


async def shell(guest: GuestClient, command: str, *, timeout_s: float = 30.0) -> str:
    return (await guest.execute(command, shell=True, timeout_s=timeout_s)).output.strip()


async def open_terminal(guest: GuestClient) -> None:
    """Opens a terminal with the keys that a person would press. Returns when its prompt is shown."""
    await guest.act([call("hotkey", "ctrl", "alt", "t")])

    async def has_prompt() -> bool:
        return "user@desktop" in (await guest.terminal() or "")

    await until(has_prompt, "a prompt")


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def left_on_the_host(images: Path) -> tuple[list[int], str, list[str], list[str]]:
    """Processes, mounts and control groups, our folders in the temporary folder, and the files next to the image."""
    folders = sorted(name for name in os.listdir(tempfile.gettempdir()) if name.startswith("desktop-"))
    mounts = Path("/proc/mounts").read_text() + "".join(map(str, control_groups(os.getpid())))
    return descendants(os.getpid()), mounts, folders, sorted(os.listdir(images))


def control_groups(server_pid: int) -> list[Path]:
    return sorted(Path("/sys/fs/cgroup").rglob(f"osworld-desktop-{server_pid}-*"))


async def test_screenshot_has_the_screen_size_in_every_format(guest: GuestClient) -> None:
    for image_format in ("png", "jpeg", "webp"):
        image = Image.open(io.BytesIO(await guest.screenshot(image_format)))
        assert image.size == (1024, 768)
        assert image.format == image_format.upper()
    assert await guest.screen_size() == (1024, 768)
    assert await guest.platform() == "Linux"


async def test_the_mouse_cursor_is_in_the_screenshot(guest: GuestClient) -> None:
    await guest.act([call("moveTo", 100, 100)])
    before = Image.open(io.BytesIO(await guest.screenshot()))
    await guest.act([call("moveTo", 500, 400)])
    after = Image.open(io.BytesIO(await guest.screenshot()))
    assert await guest.cursor_position() == (500, 400)
    box = (495, 395, 520, 425)
    assert before.crop(box).tobytes() != after.crop(box).tobytes()


async def test_many_clients_take_screenshots_while_one_acts(guest: GuestClient) -> None:
    async def look() -> None:
        for _ in range(100):
            assert await guest.screenshot("jpeg")

    async def act() -> None:
        for index in range(20):
            assert await guest.act([call("moveTo", 10 + index, 10)], settle_s=0.1)

    async with asyncio.timeout(90):
        await asyncio.gather(look(), look(), look(), act())


async def test_every_printable_character_typed_into_a_terminal_arrives(guest: GuestClient) -> None:
    await open_terminal(guest)
    text = string.printable[:95]
    await guest.act([call("write", "cat > /tmp/typed\n"), call("sleep", 0.5)])
    await guest.act([call("write", text + "\nsmörgås “€” 漢字 → <html>\n"), call("hotkey", "ctrl", "d")])

    async def is_written() -> bool:
        return ((await guest.file("/tmp/typed")) or b"").count(b"\n") == 2

    await until(is_written, "the typed text")
    assert ((await guest.file("/tmp/typed")) or b"").decode() == text + "\nsmörgås “€” 漢字 → <html>\n"


async def test_every_printable_character_typed_into_an_editor_is_saved(guest: GuestClient) -> None:
    await guest.upload("/home/user/Documents/note.txt", b"")
    await guest.open_file("/home/user/Documents/note.txt")
    await guest.activate_window("note.txt")
    text = string.printable[:95]
    await asyncio.sleep(0.5)
    await guest.act([call("write", text), call("hotkey", "ctrl", "s")])

    async def is_saved() -> bool:
        return bool(await guest.file("/home/user/Documents/note.txt"))

    await until(is_saved, "the save")
    assert ((await guest.file("/home/user/Documents/note.txt")) or b"").decode().rstrip("\n") == text.rstrip("\n")


async def test_more_unmapped_characters_than_spare_keys_are_typed_in_order(guest: GuestClient) -> None:
    await open_terminal(guest)
    text = "".join(chr(point) for point in range(0x4E00, 0x4E00 + 180))
    await guest.act([call("write", "cat > /tmp/typed\n"), call("sleep", 0.5)])
    await guest.act([call("write", text + "\n"), call("hotkey", "ctrl", "d")])

    async def is_written() -> bool:
        return (await guest.file("/tmp/typed") or b"").endswith(b"\n")

    await until(is_written, "the typed text")
    assert ((await guest.file("/tmp/typed")) or b"").decode() == text + "\n"


async def test_a_click_presses_the_button_under_it(guest: GuestClient) -> None:
    await guest.launch("yad --title=Ask --geometry=300x100+200+200 --button=Go:7; echo $? > /tmp/answer", shell=True)

    async def shows() -> bool:
        return 'name="Go"' in await guest.accessibility()

    await until(shows, "the dialog")
    tree = await guest.accessibility()
    button = tree[tree.index('<push-button name="Go"') :]
    x, y = map(int, button.split('cp:screencoord="(')[1].split(")")[0].split(","))
    width, height = map(int, button.split('cp:size="(')[1].split(")")[0].split(","))
    await guest.act([call("click", x + width // 2, y + height // 2)])

    async def is_answered() -> bool:
        return await guest.file("/tmp/answer") == b"7\n"

    await until(is_answered, "the click")


async def test_terminal_call_returns_the_text_that_the_terminal_shows(guest: GuestClient) -> None:
    assert await guest.terminal() is None
    await open_terminal(guest)
    await guest.act([call("write", "echo $((6*7))\n")])

    async def shows() -> bool:
        return "\n42\n" in (await guest.terminal() or "")

    await until(shows, "the answer in the terminal")


async def test_no_call_of_a_list_is_carried_out_when_one_is_refused(guest: GuestClient) -> None:
    await guest.act([call("moveTo", 10, 10)])
    with pytest.raises(ActionParseError, match="no call 'exec'"):
        await guest.act([call("moveTo", 300, 300), call("exec", "rm -rf /")])
    assert await guest.cursor_position() == (10, 10)


async def test_windows_open_activate_and_close_by_name(guest: GuestClient) -> None:
    await guest.launch(["mousepad"])
    await guest.activate_window("Mousepad")
    await guest.launch(["xterm"])
    await guest.activate_window("XTerm", by_class=True)
    assert await guest.window_size("Mousepad") is not None
    await guest.close_window("Mousepad")

    async def is_closed() -> bool:
        return await guest.window_size("Mousepad") is None

    await until(is_closed, "the closing")
    with pytest.raises(SetupError, match="Nowhere"):
        await guest.close_window("Nowhere")


@pytest.mark.parametrize("program", ["mousepad", "pcmanfm", "xterm"])
async def test_windows_fit_a_small_screen(images: Path, program: str) -> None:
    provider = LocalProvider(images=images, screen_size=(512, 320))
    try:
        guest = (await provider.start("small")).guest
        await guest.launch([program])
        await guest.activate_window(program, by_class=True)

        async def fits() -> bool:
            width, height = await guest.window_size(program) or (9999, 9999)
            return width <= 512 and height <= 320

        await until(fits, f"{program} fitting the screen")
    finally:
        await provider.close()


async def test_sudo_asks_for_the_password_once(guest: GuestClient) -> None:
    refused = await guest.execute("sudo id -u", shell=True)
    assert refused.returncode == 1
    assert "password is required" in refused.error
    wrong = await guest.execute("echo wrong | sudo -S id -u", shell=True)
    assert (wrong.output, wrong.returncode) == ("", 1)
    assert await shell(guest, "echo password | sudo -S id -u") == "0"
    assert await shell(guest, "sudo whoami") == "root"
    await shell(guest, "sudo -k")
    assert (await guest.execute("sudo -n id", shell=True)).returncode == 1


async def test_sudo_passes_input_output_status_and_folder(guest: GuestClient) -> None:
    await shell(guest, "echo password | sudo -S true")
    done = await guest.execute("echo hello | sudo sh -c 'cat; pwd; exit 3'", shell=True)
    assert (done.output, done.returncode) == ("hello\n/home/user\n", 3)
    assert await shell(guest, "printf 'password\\nrest\\n' | sudo -kS cat") == "rest"
    assert (await guest.execute("sudo no-such-program", shell=True)).returncode == 1


async def test_root_may_do_what_the_user_may_not(guest: GuestClient) -> None:
    for command in ("mkdir /test", "touch /etc/x", "touch /usr/local/bin/x", "ls /root"):
        assert "Permission denied" in (await guest.execute(command, shell=True)).error, command
    await shell(guest, "echo password | sudo -S mkdir /test")
    for command in ("sudo touch /etc/x /usr/local/bin/x", "sudo ls /root", "sudo chmod 777 /test", "touch /test/a"):
        assert (await guest.execute(command, shell=True)).returncode == 0, command
    assert (await guest.list_directory("/test") or {})["children"] == [{"type": "file", "name": "a"}]
    await shell(guest, "sudo touch ~/Desktop/b && sudo chmod 777 ~/Desktop/b && sudo mkdir ~/Desktop/c")
    assert await shell(guest, "ls ~/Desktop; stat -c %a ~/Desktop/b") == "b\nc\n777"


async def test_sudo_in_a_terminal_reads_the_password_without_an_echo(guest: GuestClient) -> None:
    await open_terminal(guest)
    await guest.act([call("write", "sudo touch /done\n")])

    async def asks() -> bool:
        return "[sudo] password for user:" in (await guest.terminal() or "")

    await until(asks, "the question")
    await guest.act([call("write", "password\n")])

    async def is_done() -> bool:
        return await guest.file("/done") == b""

    await until(is_done, "the command")
    assert "password\n" not in (await guest.terminal() or "").replace("[sudo] password", "")


async def test_commands_see_the_desktop_that_osworlds_tasks_expect(guest: GuestClient) -> None:
    assert (
        await shell(guest, "whoami; pwd; echo $HOME; readlink -f /bin/sh")
        == "user\n/home/user\n/home/user\n/usr/bin/dash"
    )
    folders = [child["name"] for child in (await guest.list_directory("/home/user") or {})["children"]]
    assert {"Desktop", "Documents"} <= set(folders)
    assert await guest.desktop_path() == "/home/user/Desktop"
    code = "import pyautogui; import time; pyautogui.click(512, 384); time.sleep(0.1); print(*pyautogui.position())"
    for python in ("python", "python3"):
        assert (await guest.execute([python, "-c", code])).output == "512 384\n"
    settings = "org.gnome.desktop.interface text-scaling-factor"
    assert await shell(guest, f"gsettings set {settings} 1.5; gsettings get {settings}") == "1.5"
    assert "Xvfb" in await shell(guest, "ps -ef | grep -v grep | grep Xvfb")
    assert (await guest.run_bash_script("echo $((1+1))")).output == "2\n"
    assert (await guest.run_python("print(1+1)")).output == "2\n"


async def test_pyautogui_in_the_guest_types_the_given_text(guest: GuestClient) -> None:
    await open_terminal(guest)
    lines = ("import pyautogui as p", "p.write('cat > /tmp/p\\n')", "p.sleep(.5)", "p.write('<a href=\"é\">\\n')")
    code = "; ".join((*lines, "p.hotkey('ctrl', 'd')"))
    await guest.execute(["python3", "-c", code])

    async def is_written() -> bool:
        return await guest.file("/tmp/p") == '<a href="é">\n'.encode()

    await until(is_written, "the text")


async def test_a_program_left_in_the_background_does_not_delay_the_answer(guest: GuestClient) -> None:
    started = time.monotonic()
    done = await guest.execute("nohup sleep 60 & echo started", shell=True, setup=True)
    assert (done.output, time.monotonic() - started < 5) == ("started\n", True)

    async def runs_on() -> bool:
        return await shell(guest, "pgrep -c -x sleep") == "1"

    await until(runs_on, "the program in the background")


async def test_an_endless_command_ends_at_its_time_limit(guest: GuestClient) -> None:
    done = await guest.execute("echo begun; sleep 60", shell=True, timeout_s=0.5)
    assert (done.status, done.returncode, done.output) == ("error", -1, "begun\n")
    assert "timed out" in done.error

    async def is_gone() -> bool:
        return await shell(guest, "pgrep -c -x sleep || true") == "0"

    await until(is_gone, "the end of sleep")


async def test_files_are_uploaded_and_downloaded(guest: GuestClient) -> None:
    data = bytes(range(256)) * 1000 + b"\r\n--boundary\r\n"
    await guest.upload("/home/user/new/folder/data.bin", data)
    assert await guest.file("~/new/folder/data.bin") == data
    assert await guest.file("/nowhere") is None
    assert await guest.list_directory("/nowhere") is None


async def test_a_wallpaper_is_drawn(guest: GuestClient) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (64, 48), (250, 10, 20)).save(picture, "PNG")
    await guest.upload("/home/user/red.png", picture.getvalue())
    await guest.change_wallpaper("/home/user/red.png")
    assert Image.open(io.BytesIO(await guest.screenshot())).getpixel((5, 5)) == (250, 10, 20)
    assert await guest.wallpaper() == picture.getvalue()


async def test_the_guest_has_no_network_and_sees_nothing_of_the_host(guest: GuestClient) -> None:
    assert await shell(guest, "ip -o link | wc -l") == "1"
    reach = "import socket; socket.create_connection(('192.0.2.1', 80), 3)"
    assert "unreachable" in (await guest.run_python(reach)).error
    for path in ("/image", "/new", str(REPOSITORY), sys.prefix, "/etc/ssh", "/boot", "/sys"):
        assert await shell(guest, f"test -e {path} && echo there || echo hidden") == "hidden", path
    assert await shell(guest, "ls /home") == "user"
    await shell(guest, "echo password | sudo -S true")
    assert await shell(guest, "sudo ls -A /root") == ""
    assert "root:*:" in await shell(guest, "sudo cat /etc/shadow")
    assert int(await shell(guest, "ps -e --no-headers | wc -l")) < 25
    names = {line.partition("=")[0] for line in (await shell(guest, "env")).splitlines()}
    assert names <= _GUEST_VARIABLES


_GUEST_VARIABLES = {
    *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "DISPLAY", "TERM", "PWD", "SHLVL", "_", "OLDPWD"),
    *("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "XDG_SESSION_TYPE", "XDG_CURRENT_DESKTOP"),
}


async def test_neither_user_nor_root_of_the_guest_can_weaken_its_sandbox(guest: GuestClient) -> None:
    assert (await guest.execute("unshare --user true", shell=True)).returncode != 0
    await shell(guest, "echo password | sudo -S true")
    for command in (
        "sudo mount -t tmpfs none /mnt",
        "sudo sh -c 'echo x > /proc/sys/kernel/core_pattern'",
        "sudo sh -c 'ulimit -u 100000'",
        "sudo sh -c 'echo b > /proc/sysrq-trigger'",
        "sudo unshare --mount true",
        "sudo kill -9 1; sudo kill -0 999999",
        "sudo touch /usr/bin/x",
    ):
        assert (await guest.execute(command, shell=True)).returncode != 0, command


async def test_a_fork_bomb_and_a_filled_disk_are_confined_to_the_desktop(desktop: LocalDesktop) -> None:
    bomb = (
        "import os, time\nn = 0\ntry:\n  while n < 3000:\n    n += 1\n    if os.fork() == 0: time.sleep(60)\n"
        "except BlockingIOError: print(n)\n"
    )
    made = int((await desktop.guest.run_python(bomb)).output or 3000)
    assert made <= 512
    await desktop.reset()
    filled = await desktop.guest.execute("cat /dev/zero > /tmp/big; cat /dev/zero > /dev/shm/big", shell=True)
    assert "No space left" in filled.error
    await desktop.reset()
    assert await desktop.guest.file("/tmp/big") is None


async def test_reset_removes_files_processes_and_root_changes(desktop: LocalDesktop) -> None:
    await shell(
        desktop.guest, "touch ~/Desktop/a; echo password | sudo -S touch /etc/a; nohup sleep 99 >/dev/null 2>&1 &"
    )
    await desktop.guest.launch(["mousepad"])
    await desktop.guest.activate_window("Mousepad")
    await desktop.reset()
    guest = desktop.guest
    assert await shell(guest, "ls -d ~/Desktop/* /etc/a 2>/dev/null; pgrep -c 'sleep|mousepad' || true") == "0"
    assert (await guest.execute("sudo -n true", shell=True)).returncode == 1
    assert await guest.window_size("Mousepad") is None


async def test_stop_leaves_no_process_mount_or_folder(images: Path) -> None:
    before = left_on_the_host(images)
    provider = LocalProvider(images=images, screen_size=(640, 480))
    first, second = await asyncio.gather(provider.start("a"), provider.start("b"))
    await open_terminal(first.guest)
    during = left_on_the_host(images)
    assert len(during[0]) > len(before[0]) + 8
    assert during[1].startswith(before[1])
    await first.stop()
    await first.stop()
    assert (first.is_alive(), second.is_alive()) == (False, True)
    await provider.close()
    after = left_on_the_host(images)
    assert after == (before[0], before[1], before[2], after[3])
    assert len(after[3]) == 1
    assert not after[3][0].startswith(".")
    with pytest.raises(ReplicaError, match="stopped"):
        await first.reset()


async def test_a_desktop_whose_screen_died_is_not_alive(desktop: LocalDesktop) -> None:
    await desktop.guest.launch("kill -9 $(pgrep -x Xvfb)", shell=True)

    async def is_dead() -> bool:
        return not desktop.is_alive()

    await until(is_dead, "the desktop's end")
    with pytest.raises(ReplicaError, match="replica-0"):
        await desktop.guest.screenshot()
    await desktop.reset()
    assert await desktop.guest.platform() == "Linux"


async def test_a_cancelled_start_leaves_nothing(images: Path) -> None:
    before = descendants(os.getpid())
    provider = LocalProvider(images=images, screen_size=(640, 480))
    await (await provider.start("warm")).stop()
    num_cancelled = 0
    for delay_s in (0.0, 0.02, 0.05, 0.1, 0.2):
        start = asyncio.create_task(provider.start("cancelled"))
        await asyncio.sleep(delay_s)
        start.cancel()
        try:
            desktop = await start
        except asyncio.CancelledError:
            num_cancelled += 1
        else:
            await desktop.stop()  # on a fast machine the start had ended first
    assert num_cancelled >= 2
    await provider.close()

    async def is_clean() -> bool:
        return descendants(os.getpid()) == before

    await until(is_clean, "the end of every process")


async def until_ended(pids: list[int]) -> None:
    """Waits, because a process closes its files, on which `stop` waits, a moment before it counts as ended."""

    async def have_ended() -> bool:
        return not any(map(is_running, pids))

    await until(have_ended, f"the end of {pids}")


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


async def test_killing_bubblewrap_during_startup_leaves_no_process(images: Path) -> None:
    """Until bubblewrap's child has set its parent-death signal, it outlives bubblewrap as an orphan."""
    provider = LocalProvider(images=images, screen_size=(640, 480))
    await (await provider.start("warm")).stop()
    for number in range(16):
        start = asyncio.create_task(provider.start("killed"))
        inside: list[int] = []
        end = time.monotonic() + WAIT_LIMIT_S
        while not inside:
            await asyncio.sleep(0)
            (bubblewrap,) = children(os.getpid()) or (0,)
            inside = children(bubblewrap)
            assert time.monotonic() < end
        time.sleep(number * 0.0005)  # noqa: ASYNC251 - nothing else may happen
        os.kill(bubblewrap, signal.SIGKILL)
        with pytest.raises(ReplicaError, match="killed did not start"):
            async with asyncio.timeout(5.0):
                await start
        await until_ended(inside)
    await provider.close()


_HOST = """
import asyncio, sys
from pathlib import Path
from env_server.providers.local.provider import LocalProvider

async def main():
    provider = LocalProvider(images=Path(sys.argv[1]), screen_size=(640, 480))
    desktop = await provider.start("hosted")
    done = await desktop.guest.execute("echo password | sudo -S id -u; id -un", shell=True)
    print(done.output.split(), flush=True)
    await asyncio.sleep(float(sys.argv[2]))
    await provider.close()

asyncio.run(main())
"""


async def test_desktops_of_a_killed_host_process_end_with_it(images: Path) -> None:
    host = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _HOST, str(images), "60"), stdout=asyncio.subprocess.PIPE, cwd=REPOSITORY
    )
    assert host.stdout is not None
    try:
        assert b"user" in await host.stdout.readline()
        inside = descendants(host.pid)
    finally:
        host.send_signal(signal.SIGKILL)
        await host.wait()
    assert len(inside) >= 4

    async def are_gone() -> bool:
        return not [pid for pid in inside if is_running(pid)] and not control_groups(host.pid)

    await until(are_gone, "the end of the desktop's processes")


@pytest.mark.parametrize("niceness", [0, 12])
def test_an_ordinary_user_has_the_same_desktop_at_any_niceness(niceness: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("this whole file runs as an ordinary user already")
    version = "import sys; print('%d.%d' % sys.version_info[:2])"
    system = subprocess.run(["/usr/bin/python3", "-c", version], capture_output=True, text=True, check=True).stdout
    if system.strip() != f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip("the system's Python cannot load this environment's packages")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    as_user = ("setpriv", f"--reuid={ORDINARY_UID}", f"--regid={ORDINARY_UID}", "--clear-groups")
    if subprocess.run([*as_user, "test", "-r", f"{packages}/httpx/__init__.py"], check=False).returncode:
        pytest.skip("this environment is hidden from other users")
    with tempfile.TemporaryDirectory() as images:
        os.chown(images, ORDINARY_UID, ORDINARY_UID)
        done = subprocess.run(
            ["nice", "-n", str(niceness), *as_user, "/usr/bin/python3", "-Bc", _HOST, images, "0"],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{REPOSITORY}:{packages}"},
            cwd="/", capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout.strip() == "['0', 'user']", done.stderr[-2000:]


async def test_resets_are_fast(desktop: LocalDesktop) -> None:
    times_s = []
    for _ in range(9):
        started = time.monotonic()
        await desktop.reset()
        times_s.append(time.monotonic() - started)
    print(f"reset p50 {statistics.median(times_s):.2f} s, at most {max(times_s):.2f} s")
    assert statistics.median(times_s) < 3.0, times_s
