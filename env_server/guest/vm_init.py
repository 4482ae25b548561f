"""Process 1 of a desktop in a virtual machine: mounts, network, the X server on the emulated display, then the guest
agent as the desktop's user. The host sends commands over a serial line; when the desktop ends, the machine powers
off."""

# pyright: reportMissingImports=false
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Mapping
from pathlib import Path

from .user_environment import HOME, RUNTIME, USER_ENVIRONMENT, USER_ID

PORT = 5000
X_START_LIMIT_S = 120.0
HOST_LINE = "/dev/ttyS1"
ADDRESS, GATEWAY, NAME_SERVER = "10.0.2.15/24", "10.0.2.2", "10.0.2.3"
"""Addresses of QEMU's user-mode network, the same in every machine."""
MS_NOSUID, MS_NODEV = 2, 4
RB_POWER_OFF = 0x4321FEDC
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207
POWER_OFF_DELAY_S = 0.2

XORG_CONFIG = """\
Section "ServerFlags"
  Option "AutoAddDevices" "false"
  Option "BlankTime" "0"
  Option "StandbyTime" "0"
  Option "SuspendTime" "0"
  Option "OffTime" "0"
  Option "DontVTSwitch" "true"
EndSection
Section "Device"
  Identifier "display"
  Driver "modesetting"
  Option "AccelMethod" "none"
  Option "SWcursor" "true"
EndSection
Section "Screen"
  Identifier "screen"
  Device "display"
  DefaultDepth 24
EndSection
"""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    os.umask(0o022)
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    options = kernel_options(Path("/proc/cmdline").read_text() if os.path.exists("/proc/cmdline") else "")
    try:
        mount_all()
        if "desktop.size" not in options:
            options = kernel_options(Path("/proc/cmdline").read_text())
        start_network()
        threading.Thread(target=listen_to_host, daemon=True).start()
        x_server = start_x_server()
        agent = start_agent(options)
        print("desktop-init: the desktop is started", flush=True)
        reap_until({x_server.pid, agent})
        print("desktop-init: the desktop ended", flush=True)
    except Exception as error:  # noqa: BLE001 - process 1 must end the machine, not panic the kernel
        print(f"desktop-init: {type(error).__name__}: {error}", flush=True)
    power_off()


def kernel_options(command_line: str) -> dict[str, str]:
    """Options such as `desktop.size=1280x720`."""
    pairs = (word.partition("=") for word in command_line.split())
    return {key: value for key, _, value in pairs if key.startswith("desktop.")}


def mount_all() -> None:
    """Mounts what the initial RAM disk has not mounted."""
    for kind, target, flags, data in (
        ("proc", "/proc", MS_NOSUID | MS_NODEV, ""),
        ("sysfs", "/sys", MS_NOSUID | MS_NODEV, ""),
        ("devtmpfs", "/dev", MS_NOSUID, "mode=0755"),
        ("devpts", "/dev/pts", MS_NOSUID, "mode=0620,gid=5,ptmxmode=0666"),
        ("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777"),  # noqa: S108 - a mount point
        ("tmpfs", "/run", MS_NOSUID | MS_NODEV, "mode=0755"),
        ("tmpfs", "/tmp", MS_NOSUID | MS_NODEV, "mode=1777"),  # noqa: S108 - a mount point
    ):
        if os.path.ismount(target):
            continue
        os.makedirs(target, exist_ok=True)
        if _libc.mount(kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()):
            raise OSError(ctypes.get_errno(), f"mount {target}")
    os.makedirs(RUNTIME, mode=0o700)
    os.chown(RUNTIME, USER_ID, USER_ID)
    os.makedirs("/tmp/.X11-unix", mode=0o1777)  # noqa: S108 - X11's fixed path
    os.chmod("/tmp/.X11-unix", 0o1777)  # noqa: S103, S108 - the mode that X11 requires


def start_network() -> None:
    """An address without a default route: connections fail at once, as on a machine without network."""
    socket.sethostname(Path("/etc/hostname").read_text().strip())
    _run("ip", "link", "set", "lo", "up")
    card = next((name for name in sorted(os.listdir("/sys/class/net")) if name != "lo"), None)
    if card is None:
        raise OSError("the machine has no network card")
    _run("ip", "link", "set", card, "up")
    _run("ip", "address", "add", ADDRESS, "dev", card)


def start_x_server() -> subprocess.Popen[bytes]:
    """Returns once it accepts connections."""
    config = Path("/run/xorg.conf")
    config.write_text(XORG_CONFIG + _input_sections())
    process = subprocess.Popen(
        [
            *("Xorg", ":0", "vt7", "-novtswitch", "-config", str(config), "-logfile", "/run/xorg.log"),
            *("-nolisten", "tcp", "-noreset", "-ac", "-quiet", "+extension", "XTEST"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until = time.monotonic() + X_START_LIMIT_S
    while not os.path.exists("/tmp/.X11-unix/X0"):  # noqa: S108 - X11's fixed path
        if process.poll() is not None or time.monotonic() > until:
            log = Path("/run/xorg.log")
            print(log.read_text()[-3000:] if log.exists() else "Xorg left no log", flush=True)
            raise OSError("the X server did not start")
        time.sleep(0.05)
    return process


def _input_sections() -> str:
    """The emulated keyboard and tablet by their device files; there is no udev to announce them to the X server."""
    sections, layout = "", ""
    for event in sorted(Path("/sys/class/input").glob("event*")):
        name = (event / "device/name").read_text().strip()
        role = "CoreKeyboard" if "Keyboard" in name and "Virtio" in name.title() else None
        role = "CorePointer" if "Tablet" in name else role
        if role is None:
            continue
        sections += f'Section "InputDevice"\n  Identifier "{event.name}"\n  Driver "evdev"\n'
        sections += f'  Option "Device" "/dev/input/{event.name}"\nEndSection\n'
        layout += f'  InputDevice "{event.name}" "{role}"\n'
    return sections + f'Section "ServerLayout"\n  Identifier "layout"\n  Screen "screen"\n{layout}EndSection\n'


def start_agent(options: Mapping[str, str]) -> int:
    """Starts the guest agent as the desktop's user and passes it the listening socket. Returns the process id."""
    width, _, height = options.get("desktop.size", "1280x720").partition("x")
    listener = socket.create_server(("0.0.0.0", PORT), backlog=128)  # noqa: S104 - the guest has its own network
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by every accepted connection
    argv = ["/usr/bin/python3", "-Im", "osworld_guest.agent", "--width", width, "--height", height]
    argv += ["--listener-fd", str(listener.fileno()), "--use-running-x-server"]
    if options.get("desktop.protocol") == "osworld":
        argv += ["--osworld-routes-only"]
    pid = os.fork()
    if pid:
        listener.close()
        return pid
    os.set_inheritable(listener.fileno(), True)
    os.setsid()
    os.initgroups("user", USER_ID)
    os.setgid(USER_ID)
    os.setuid(USER_ID)
    os.chdir(HOME)
    os.execve(argv[0], argv, USER_ENVIRONMENT)  # noqa: S606 - no shell is wanted


def listen_to_host() -> None:
    """Each line is a JSON object `{time_s, seed, open_network}`: the machine was restored at a later time, possibly as
    one of many copies of one state. The answer is a line `{"ok": true}`, or `{"ok": false, "error": ...}`."""
    with open(HOST_LINE, "r+b", buffering=0) as line:
        tty.setraw(line.fileno(), termios.TCSANOW)
        pending = b""
        while True:
            pending += os.read(line.fileno(), 4096)
            *messages, pending = pending.split(b"\n")
            for message in messages:
                try:
                    wake_up(json.loads(message))
                    answer: dict[str, object] = {"ok": True}
                except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
                    answer = {"ok": False, "error": str(error)}
                os.write(line.fileno(), json.dumps(answer).encode() + b"\n")


def wake_up(message: Mapping[str, object]) -> None:
    """Sets the clock and reseeds the random number generator of this machine. With `open_network` it also adds the
    default route and the name server."""
    time.clock_settime(time.CLOCK_REALTIME, float(str(message["time_s"])))
    seed = bytes.fromhex(str(message["seed"]))
    with open("/dev/random", "wb", buffering=0) as pool:
        fcntl.ioctl(pool, RNDADDENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
        fcntl.ioctl(pool, RNDRESEEDCRNG)
    if message.get("open_network"):
        _run("ip", "route", "replace", "default", "via", GATEWAY)
        Path("/etc/resolv.conf").write_text(f"nameserver {NAME_SERVER}\n")


def reap_until(needed: set[int]) -> None:
    """Reaps every orphan; returns when one of `needed` has ended."""
    while True:
        try:
            pid, _ = os.wait()
        except ChildProcessError:
            return
        if pid in needed:
            return


def power_off() -> None:
    sys.stdout.flush()
    os.sync()
    time.sleep(POWER_OFF_DELAY_S)
    _libc.reboot(RB_POWER_OFF)
    signal.pause()


def _run(*argv: str) -> None:
    if shutil.which(argv[0]) is None:
        raise FileNotFoundError(f"{argv[0]} is not in the image")
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, timeout=60)


if __name__ == "__main__":
    main()
