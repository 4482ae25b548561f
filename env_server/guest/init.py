"""Process 1 of a desktop's sandbox: root in namespaces that contain nothing of the host. It gives the desktop its own
root file system, starts the sudo helper, drops its capabilities, and then runs the guest agent.

The agent is process 1 so that no program of the desktop can stop it, kill it or replace it: the kernel does not deliver
unhandled signals to process 1 from inside its namespace, and programs run in a child user namespace."""

import ctypes
import gc
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .programs import CAPABILITY_VERSION, CLONE_NEWUSER, reap_children, use_namespace
from .root_helper import RootHelper
from .seccomp import install_filter
from .user_environment import HOME, RUNTIME, USER_ENVIRONMENT, USER_ID

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 32, 4096, 16384
MNT_DETACH = 2
PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
CAP_SYS_PTRACE, CAP_LAST = 19, 63
SUDO_SOCKET = "/run/sudo.socket"
NEW_ROOT = Path("/new")

ROOT_SHARE, TMP_SHARE, SHM_SHARE, RUN_SHARE = 6, 5, 2, 1
SHARES = 20
"""Files are in memory here. Even if all folders are full, 6/20 of the memory is left for programs."""
MAX_FILE_BYTES = 1024 * 1024 * 1024
MAX_DATA_BYTES = 4 * 1024 * 1024 * 1024
MAX_OPEN_FILES = 4096

REAP_PAUSE_S = 0.02
_LIFELINE = 2
"""Standard error is a pipe to the host process. If its reading end is closed, the host process has died and the desktop
must end."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Arguments: `--image FOLDER` and numbers. `--listener-fd` is the listening socket of the guest agent,
    `--memory-bytes` the limit for files and programs together, `--nice` the niceness of the desktop's programs. They
    are parsed without argparse, whose import would slow the start of every desktop."""
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    listener_fd, nice = int(arguments["--listener-fd"]), int(arguments["--nice"])
    os.umask(0o022)
    make_root(Path(arguments["--image"]), memory_bytes=int(arguments["--memory-bytes"]))
    set_limits(max_processes=int(arguments["--max-processes"]))
    Path("/proc/self/oom_score_adj").write_text("800")  # if memory runs out, desktops are killed before host processes
    Path("/proc/sys/user/max_user_namespaces").write_text("1")  # only the desktop user's, which is made next
    install_filter()
    namespace = make_user_namespace()
    start_root_helper(listener_fd, nice=nice)
    keep_one_capability()
    os.environ.clear()
    os.environ.update(USER_ENVIRONMENT)
    os.chdir(HOME)
    find_packages()
    run_agent = import_agent()
    use_namespace(namespace, nice=nice)
    supervise()
    width, height = int(arguments["--width"]), int(arguments["--height"])
    run_agent(listener_fd, width=width, height=height, runtime=Path(RUNTIME))


def make_root(image: Path, *, memory_bytes: int) -> None:
    """A root in memory: a copy of the image, the host's /usr read-only, /proc, /dev, and folders of limited size. It is
    a copy instead of an overlay, because the image is only a few hundred small files, and because not every kernel
    can rename a folder of an overlay's lower layer, or delete and create it again."""
    NEW_ROOT.mkdir()
    _mount("root", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, f"size={memory_bytes * ROOT_SHARE // SHARES},mode=0555")
    subprocess.run(
        ["cp", "-dR", "--preserve=mode,timestamps", f"{image}/.", str(NEW_ROOT)], check=True, stdin=subprocess.DEVNULL
    )
    for name in ("proc", "dev", "usr"):
        (NEW_ROOT / name).mkdir(exist_ok=True)
        _mount(f"/{name}", NEW_ROOT / name, None, MS_BIND | MS_REC, None)
    _mount(NEW_ROOT / "opt/local", NEW_ROOT / "usr/local", None, MS_BIND, None)
    for name, mode, share in (("tmp", 0o1777, TMP_SHARE), ("run", 0o755, RUN_SHARE), ("dev/shm", 0o1777, SHM_SHARE)):
        (NEW_ROOT / name).mkdir(exist_ok=True)
        size = memory_bytes * share // SHARES
        _mount(name, NEW_ROOT / name, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode={mode:o}")
    _mount(None, NEW_ROOT / "dev", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID, None)
    (NEW_ROOT / "tmp/.X11-unix").mkdir(mode=0o1777)
    (NEW_ROOT / "tmp/.X11-unix").chmod(0o1777)
    os.makedirs(NEW_ROOT / f"run/user/{USER_ID}", mode=0o700)
    _take_away_owner_writes(NEW_ROOT)
    os.chdir(NEW_ROOT)
    if _libc.pivot_root(b".", b".") or _libc.umount2(b".", MNT_DETACH):
        raise OSError(ctypes.get_errno(), "pivot_root")
    os.chdir("/")


def _take_away_owner_writes(root: Path) -> None:
    """The user and root are the same owner to the kernel here, so root's files are made unwritable to their owner; root
    can still write them through its capabilities."""
    for top in ("etc", "var", "opt", "root", "srv", "mnt", "media"):
        for folder, _, files in os.walk(root / top):
            os.chmod(folder, 0 if top == "root" else 0o555)
            for name in files:
                path = os.path.join(folder, name)
                if not os.path.islink(path):
                    os.chmod(path, os.stat(path).st_mode & 0o555)
    for folder in (root / "home", root, root / "run"):
        folder.chmod(0o555)
    (root / "etc/shadow").chmod(0)
    (root / "var/tmp").chmod(0o1777)


def set_limits(*, max_processes: int) -> None:
    for kind, limit in (
        (resource.RLIMIT_NPROC, max_processes),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_DATA, MAX_DATA_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        wanted = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (wanted, wanted))


def make_user_namespace() -> int:
    """Creates a child user namespace in which the desktop's user has uid 1000. Returns its file descriptor."""
    mapped_read, mapped_write = os.pipe()
    seen_read, seen_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if _libc.unshare(CLONE_NEWUSER):
                os._exit(71)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{USER_ID} 0 1")
            Path("/proc/self/gid_map").write_text(f"{USER_ID} 0 1")
            os.write(mapped_write, b"1")
            os.close(seen_write)
            os.read(seen_read, 1)
        finally:
            os._exit(0)
    os.close(mapped_write)
    if os.read(mapped_read, 1) != b"1":
        raise OSError("the desktop's user namespace could not be made")
    namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    for end in (mapped_read, seen_read, seen_write):
        os.close(end)
    os.waitpid(pid, 0)
    return namespace


def start_root_helper(agent_listener_fd: int, *, nice: int) -> None:
    """Runs the sudo helper in a separate process. If it dies, only sudo fails."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(SUDO_SOCKET)
    os.chmod(SUDO_SOCKET, 0o666)  # noqa: S103 - requests need the password
    listener.listen(64)
    if os.fork() == 0:
        try:
            os.setsid()
            os.close(agent_listener_fd)
            os.nice(nice)
            RootHelper(listener).serve()
        finally:
            os._exit(1)
    listener.close()


def keep_one_capability() -> None:
    """Process 1 parses input from the policy, so it gets no more rights than the desktop's user. It keeps one permitted
    capability that root of the desktop lacks, so ptrace access checks deny root access to its memory (ptrace(2)).
    """
    _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(CAP_LAST + 1):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for a capability that this kernel does not have
    permitted = 1 << CAP_SYS_PTRACE
    # Effective, permitted, inheritable; each in two halves.
    data = struct.pack("=6I", 0, permitted, 0, 0, 0, 0)
    if _libc.capset(struct.pack("=Ii", CAPABILITY_VERSION, 0), data):
        raise OSError(ctypes.get_errno(), "capset")


def find_packages() -> None:
    """Sets the import path for the new root, and adds the system's packages, which were left out before."""
    import site

    folder = "/usr/local/lib/python{}.{}/dist-packages".format(*sys.version_info)
    sys.path[0] = folder
    sys.path += site.getsitepackages()
    sys.modules[str(__package__)].__path__ = [f"{folder}/{__package__}"]


def import_agent() -> Callable[..., None]:
    """Imports are most of the agent's CPU time in a short episode. They are done without garbage collection, which the
    command line has disabled, and without ssl, which a desktop without a network does not need."""
    sys.modules["ssl"] = None  # pyright: ignore[reportArgumentType]
    from .agent import run_agent

    gc.enable()
    return run_agent


def supervise() -> None:
    """Starts a thread that reaps orphaned processes, and ends the desktop when the host process is gone."""
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    # Handled, not ignored: an ignored signal stays ignored in every program that is started.
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_supervise, args=(wake_read,), daemon=True).start()


def _supervise(wake_read: int) -> None:
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    poll.register(_LIFELINE, 0)
    while all(file != _LIFELINE for file, _ in poll.poll()):
        os.read(wake_read, 65536)
        reap_children()
        time.sleep(REAP_PAUSE_S)  # several processes usually end together
    os._exit(1)


def _mount(source: Path | str | None, target: Path, kind: str | None, flags: int, data: str | None) -> None:
    encoded = [None if item is None else str(item).encode() for item in (source, target, kind, data)]
    if _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]):
        number = ctypes.get_errno()
        raise OSError(number, f"mount {target}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
