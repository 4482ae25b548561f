"""A separate host user for each sandbox (a local desktop, a virtual machine, the graders) if the server is root. The
kernel then counts per-user resources (descriptors in flight, processes, namespaces) for each sandbox, and no sandbox
can exhaust them for another.

An id is claimed by binding an abstract UNIX socket with a name that contains it. The kernel frees the name when the
process ends, and two servers in one network namespace never claim the same id."""

import errno
import os
import random
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from osworld_pipeline.errors import DependencyError

RANGES = (range(1_500_000_000, 1_500_004_096), range(60_706, 61_184))
"""User ids without an account, in order of preference; the second is for a container that maps 65,536 ids."""
_NAME = "\0osworld-desktop-user-{uid}"


class HostUsers:
    """The user ids that this machine has for desktops; `open` determines them."""

    def __init__(self, uids: Sequence[int]) -> None:
        """Desktops run as the current user if there are no ids."""
        self._uids = uids
        self._claims: dict[int, socket.socket] = {}
        self._next = random.randrange(len(uids)) if uids else 0

    @classmethod
    def open(cls, *, uid_map: Path = Path("/proc/self/uid_map"), ranges: Iterable[range] = RANGES) -> Self:
        """Finds the ids. A desktop's root must not be the host's root, not even in a namespace, because the host's root
        owns the files under /proc/sys.

        Raises:
            DependencyError: this is root, and there is no other user.
        """
        if os.geteuid() != 0:
            return cls(())
        extents = [tuple(map(int, line.split())) for line in uid_map.read_text().splitlines()]
        for uids in ranges:
            if any(first <= uids[0] and uids[-1] < first + count for first, _, count in extents):
                return cls(uids)
        if all(outside != 0 for _, outside, _ in extents):
            return cls(())  # root of a namespace with few ids: an ordinary user to the host
        raise DependencyError(
            "root has no second user id here to run a desktop as; start the env server as another user"
        )

    def claim(self) -> int | None:
        """An id until it is released or this process ends; None if desktops run as the current user. An id is reused
        only after all others, so that resources of its last desktop, which the kernel frees later, do not count.

        Raises:
            DependencyError: every id is in use.
        """
        for _ in range(len(self._uids)):
            uid = self._uids[self._next]
            self._next = (self._next + 1) % len(self._uids)
            claim = _bind(_NAME.format(uid=uid))
            if claim is not None:
                self._claims[uid] = claim
                return uid
        if not self._uids:
            return None
        raise DependencyError(
            f"all {len(self._uids)} host users of local desktops ({self._uids[0]} to {self._uids[-1]}) are used; stop "
            "other env servers on this machine, or start this one with fewer --replicas"
        )

    def release(self, uid: int | None) -> None:
        """Call it once the last process of this user is gone."""
        if uid is not None:
            self._claims.pop(uid).close()


def _bind(name: str) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(name)
    except OSError as error:
        claim.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return claim
