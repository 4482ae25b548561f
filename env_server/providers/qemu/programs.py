"""The programs of the host that virtual machines need; a missing one is a DependencyError with its Debian package."""

import shutil
import subprocess
from collections.abc import Mapping

from env_server.providers.requirements import SYSTEM_PATH
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import DependencyError

RUN_PROGRAMS: Mapping[str, str] = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "bwrap": "bubblewrap",
    "python3": "python3",
}
NETWORK_PROGRAMS: Mapping[str, str] = {"slirp4netns": "slirp4netns"}
"""Needed if machines have network access."""
BUILD_PROGRAMS: Mapping[str, str] = {"mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs", "qemu-img": "qemu-utils"}
"""Program on PATH -> the Debian package that contains it."""
TOOLS_PROGRAMS: Mapping[str, str] = {"genisoimage": "genisoimage"}
"""Programs that make the disc with a guest's tools."""
_QUERY_LIMIT_S = 30


def check_qemu(*, open_network: bool = False) -> None:
    _check({**RUN_PROGRAMS, **(NETWORK_PROGRAMS if open_network else {})}, "a virtual machine needs")


def check_builder() -> None:
    _check(BUILD_PROGRAMS, "building the virtual machines' image needs")


def qemu_version() -> str:
    """The first line that `--version` prints, such as `QEMU emulator version 7.2.22 (Debian ...)`. Other versions
    cannot read the states of this one."""
    try:
        done = subprocess.run(
            [find("qemu-system-x86_64"), "--version"],
            capture_output=True, text=True, timeout=_QUERY_LIMIT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise DependencyError(f"qemu-system-x86_64 does not run ({error}); reinstall qemu-system-x86") from error
    return done.stdout.splitlines()[0]


def find(program: str) -> str:
    """Its path. DependencyError if it is missing."""
    path = shutil.which(program, path=SYSTEM_PATH)
    if path is None:
        package = {**RUN_PROGRAMS, **NETWORK_PROGRAMS, **BUILD_PROGRAMS, **TOOLS_PROGRAMS}.get(program, program)
        raise DependencyError(f"{program} of the Debian package {package} is missing; run `{how_to_set_up('qemu')}`")
    return path


def _check(programs: Mapping[str, str], what: str) -> None:
    missing = {package for program, package in programs.items() if shutil.which(program, path=SYSTEM_PATH) is None}
    if missing:
        names = " ".join(sorted(missing))
        raise DependencyError(f"{what} the Debian packages {names}; run `{how_to_set_up('qemu')}`")
