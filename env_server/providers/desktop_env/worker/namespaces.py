"""Creates namespaces for an unprivileged process, with the file systems and limits in which it then runs."""

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

_NEW_MOUNTS, _NEW_USERS, _NEW_PIDS, _NEW_NET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
_NEW_IPC, _NEW_HOST_NAME = 0x08000000, 0x04000000
_NO_SUID, _NO_DEVICES, _NO_EXEC, _BIND = 2, 4, 8, 4096
_PR_SET_PDEATHSIG = 1
_CAPABILITY_VERSION = 0x20080522
_GET_FLAGS, _SET_FLAGS, _IS_UP = 0x8913, 0x8914, 1
PRIVATE = ("/tmp", "/dev/shm")  # noqa: S108 - mount points
"""Each is a separate file system of the grader."""
_libc = ctypes.CDLL(None, use_errno=True)


def enter_namespaces() -> None:
    """Creates user, process, network, IPC and host name namespaces; the next child is process 1 of the new process
    namespace."""
    uid, gid = os.getuid(), os.getgid()
    _checked("unshare", _NEW_USERS | _NEW_PIDS | _NEW_NET | _NEW_IPC | _NEW_HOST_NAME)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def make_private(kept: Sequence[str], *, disk_bytes: int) -> None:
    """To be called by the child that follows `enter_namespaces`: gives it empty file systems, its own /proc,
    and a loopback. Folders in `kept` stay visible."""
    _checked("unshare", _NEW_MOUNTS)
    held = {path: os.open(path, os.O_PATH) for path in kept if path.startswith(tuple(f"{each}/" for each in PRIVATE))}
    for path in PRIVATE:
        _mount("tmpfs", path, "tmpfs", _NO_SUID | _NO_DEVICES, f"size={disk_bytes},mode=1777")
    for path, descriptor in held.items():
        os.makedirs(path)
        _mount(f"/proc/self/fd/{descriptor}", path, "", _BIND)
        os.close(descriptor)
    _mount("proc", "/proc", "proc", _NO_SUID | _NO_DEVICES | _NO_EXEC)
    os.chdir(PRIVATE[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = b"lo".ljust(16, b"\0")
        flags = struct.unpack("=16xH", fcntl.ioctl(any_socket, _GET_FLAGS, name + bytes(24))[:18])[0]
        fcntl.ioctl(any_socket, _SET_FLAGS, name + struct.pack("=H22x", flags | _IS_UP))


def set_limits(*, memory_bytes: int, cpu_s: int, num_processes: int, disk_bytes: int) -> None:
    """Sets the limits of this process, which each of its descendants inherits; processes are counted only in this user
    namespace."""
    for kind, limit in (
        (resource.RLIMIT_DATA, memory_bytes),
        # No lower soft limit, because process 1 ignores SIGXCPU.
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NPROC, num_processes),
        (resource.RLIMIT_FSIZE, disk_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def drop_capabilities() -> None:
    """Drops the capabilities that the first process of a user namespace has there."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _checked("capset", header, bytes(24))


def die_with_parent() -> None:
    """Sends this process SIGKILL when its parent ends. The parent is in another process namespace and has no id
    here."""
    _checked("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    data = options.encode() or None
    _checked("mount", source.encode(), target.encode(), kind.encode() or None, flags, data, what=f"mount {target}")


def _checked(function: str, *arguments: object, what: str = "") -> None:
    if getattr(_libc, function)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{what or function}: {os.strerror(ctypes.get_errno())}")
