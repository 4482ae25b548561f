"""The sandbox of one virtual machine on its host: its command line, and the users and control groups that this host has
for machines. QEMU sees the system's folders and its own files, and can write to none of them: it gets writable files
as open descriptors."""

import asyncio
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from env_server.providers.bounds import Bounds, DesktopLimits
from env_server.providers.bubblewrap import SYSTEM_FOLDERS
from env_server.providers.host_resources import Releases
from env_server.providers.host_users import HostUsers
from env_server.providers.qemu.command import MachineSpec
from env_server.providers.requirements import SYSTEM_PATH, SYSTEM_PYTHON, try_sandbox
from osworld_pipeline.errors import DependencyError

log = logging.getLogger(__name__)

QEMU_MEMORY_MB = 512
"""Memory that QEMU, its translated code and the bridge use in addition to the guest's own."""
NUM_THREADS = 256
PROBE_LIMIT_S = 20.0
KVM_DEVICE = Path("/dev/kvm")
TUN_DEVICE = Path("/dev/net/tun")
_SYSTEM = Path("/usr")
_BRIDGE = "/bridge.py"
_AS_USER = """\
set -e
mount -t tmpfs -o mode=0755 tmpfs /mnt
uid=$1 number=0
shift
while [ "$1" != -- ]; do
  number=$((number + 1))
  cp -a "$1" "/mnt/device$number"
  chown "$uid:$uid" "/mnt/device$number"
  mount --bind "/mnt/device$number" "$1"
  shift
done
shift
number=0
while [ "$1" != -- ]; do
  : > "/mnt/$number"
  mount --bind "$1" "/mnt/$number"
  number=$((number + 1))
  shift
done
shift
exec setpriv --reuid "$uid" --regid "$uid" --clear-groups "$@"
"""
"""Run in a separate mount namespace: gives the devices to the user, mounts the files where that user can reach them
even in private folders, and then drops root."""


@dataclass(frozen=True, kw_only=True)
class SandboxFiles:
    """The files that a sandbox sees. The descriptors are inherited and read to their end."""

    read_only: tuple[Path, ...]
    devices: tuple[Path, ...]
    bridge_fd: int
    name_servers_fd: int | None
    """The text of /etc/resolv.conf; None without a network."""


def files_of(spec: MachineSpec) -> tuple[Path, ...]:
    """The files that QEMU opens by their paths."""

    def paths() -> Iterator[Path]:
        yield from spec.disks
        if spec.boot is not None:
            yield spec.boot.kernel
            if spec.boot.initrd is not None:
                yield spec.boot.initrd
        if spec.firmware is not None:
            yield spec.firmware.code
        if spec.files_archive is not None:
            yield spec.files_archive

    return tuple(path for path in dict.fromkeys(paths()) if not path.is_relative_to(_SYSTEM))


def sandbox_command(
    files: SandboxFiles, qemu: Sequence[str], *, uid: int | None, listener_fd: int, lifeline_fd: int, port: int
) -> list[str]:
    """The whole command line; process 1 inside is the bridge. `uid` is None if this process is an ordinary user."""
    bridge = [SYSTEM_PYTHON, "-IS", _BRIDGE, str(listener_fd), str(lifeline_fd), str(port)]
    shown = ["--perms", "0444", "--ro-bind-data", str(files.bridge_fd), _BRIDGE]
    if files.name_servers_fd is not None:
        shown += ["--perms", "0444", "--ro-bind-data", str(files.name_servers_fd), "/etc/resolv.conf"]
    for device in files.devices:
        shown += ["--dev-bind", str(device), str(device)]
    for number, path in enumerate(files.read_only):
        shown += ["--ro-bind", str(path) if uid is None else f"/mnt/{number}", str(path)]
    outer = as_user(uid, devices=files.devices, files=files.read_only)
    return [*outer, *_WALLS, *shown, "--remount-ro", "/", "--", *bridge, *qemu]


_WALLS = (
    "bwrap", "--unshare-user", "--uid", "0", "--gid", "0", "--cap-drop", "ALL", "--unshare-pid", "--as-pid-1",
    "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "machine",
    "--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", SYSTEM_PATH, *SYSTEM_FOLDERS,
)  # fmt: skip


def as_user(uid: int | None, *, devices: Sequence[Path] = (), files: Sequence[Path] = ()) -> list[str]:
    """The prefix of a command that is to run as that user; empty if `uid` is None."""
    if uid is None:
        return []
    shell = ["/bin/sh", "-c", _AS_USER, "sh", str(uid), *map(str, devices), "--", *map(str, files), "--"]
    return ["unshare", "--mount", "--propagation", "private", *shell]


class Walls:
    """The users and control groups of one provider's machines. `open` finds out what this host has; `close` removes
    the rest."""

    def __init__(self, users: HostUsers, bounds: Bounds) -> None:
        self.users, self.bounds = users, bounds
        self.releases = Releases()

    @classmethod
    def open(cls, *, memory_mb: int) -> Self:
        """
        Raises:
            DependencyError: this host allows no sandbox; the message names the setting.
        """
        users = HostUsers.open()
        _check_namespaces(users)
        limits = DesktopLimits(memory_bytes=(memory_mb + QEMU_MEMORY_MB) << 20, num_processes=NUM_THREADS)
        bounds = Bounds.open(limits)
        log.info("each virtual machine has %s", bounds.description)
        return cls(users, bounds)

    async def close(self) -> None:
        """
        Raises:
            ReplicaError: names what could not be removed.
        """
        try:
            await self.releases.close()
        finally:
            await asyncio.to_thread(self.bounds.close)

    def check_readable(self, paths: Sequence[Path]) -> None:
        """DependencyError if QEMU's user, unlike root, may not read a file."""
        if os.geteuid() != 0:
            return
        for path in paths:
            if not path.stat().st_mode & stat.S_IROTH:
                raise DependencyError(
                    f"QEMU runs as an unprivileged user, who may not read {path}; allow it: chmod o+r {path}"
                )


def _check_namespaces(users: HostUsers) -> None:
    uid = users.claim()
    try:
        try_sandbox([*as_user(uid), *_WALLS, "--", "/usr/bin/true"], limit_s=PROBE_LIMIT_S)
    finally:
        users.release(uid)
