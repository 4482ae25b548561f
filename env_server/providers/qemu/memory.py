"""A machine's memory as an unnamed file in the host's memory. That of a saved state is sealed: every machine maps it
copy-on-write, and no process can write to it, not even QEMU, which opens it for writing."""

import fcntl
import os
import subprocess
from pathlib import Path

from env_server.providers.qemu.programs import find
from osworld_pipeline.errors import DependencyError

_COPY_LIMIT_S = 300.0
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class GuestMemory:
    """`fd` is open until `close`."""

    def __init__(self, size_bytes: int) -> None:
        self.fd = os.memfd_create("machine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size_bytes)

    @classmethod
    def load(cls, saved: Path) -> "GuestMemory":
        """A sealed copy. DependencyError if memory does not suffice."""
        memory = cls(saved.stat().st_size)
        try:
            _copy(str(saved), f"/proc/self/fd/{memory.fd}", memory.fd)
            fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            memory.close()
            raise
        return memory

    def save(self, path: Path) -> None:
        """Writes a sparse file: zeros use no space."""
        _copy(f"/proc/self/fd/{self.fd}", str(path), self.fd)

    def close(self) -> None:
        """Idempotent. Machines that have mapped it keep it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _copy(source: str, target: str, fd: int) -> None:
    try:
        subprocess.run(
            [find("cp"), "--sparse=always", "--", source, target],
            pass_fds=(fd,), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COPY_LIMIT_S, check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise DependencyError(f"a machine's memory cannot be copied: {error.stderr.strip()[-300:]}") from error
    except subprocess.TimeoutExpired as error:
        raise DependencyError(f"a machine's memory was not copied within {_COPY_LIMIT_S:g} s") from error
