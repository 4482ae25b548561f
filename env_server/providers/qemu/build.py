"""Builds the base disk of our virtual machines with mmdebstrap: one command, about a minute, cached by the digest of
its recipe. To run it by hand: `python -m env_server.providers.qemu.build --state-dir DIR`."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from env_server.providers.files import keep_newest, locked, make_readable, remove_leftovers
from env_server.providers.qemu.apt_sources import host_apt_options, host_sources
from env_server.providers.qemu.programs import check_builder, find
from env_server.providers.qemu.recipe import (
    DESKTOP_PACKAGES,
    FINISH_HOOK,
    MACHINE_PACKAGES,
    PREPARE_HOOK,
    SUITE,
    dpkg_options,
    recipe_digest,
)
from env_server.providers.requirements import SYSTEM_PATH
from osworld_pipeline.domain.parent import dies_with_parent
from osworld_pipeline.errors import DependencyError
from osworld_pipeline.programs.answers import print_json
from osworld_pipeline.programs.arguments import ArgumentParser, add_json
from osworld_pipeline.programs.failures import run_server_program

BUILD_LIMIT_S = 1800.0
"""Half an hour: the packages come over the network."""
KEPT_IMAGES = 2
_TAIL_CHARS = 600
_WITHOUT_ROOT = (
    "without root it needs user namespaces, the Debian package uidmap, ids of this user in /etc/subuid and "
    "/etc/subgid, and a state folder that other users can enter; or build the image as root"
)


@dataclass(frozen=True, kw_only=True)
class BaseImage:
    """A built base disk with its kernel and initial RAM disk."""

    folder: Path
    digest: str
    """SHA-256 over the recipe and the versions of every package in it."""

    @property
    def disk(self) -> Path:
        return self.folder / "disk.qcow2"

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.folder / "initrd.img"


def find_image(images: Path) -> BaseImage | None:
    """The base image of the current recipe, if it has been built."""
    folder = images / f"base-{recipe_digest()[:24]}"
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return None
    return BaseImage(folder=folder, digest=hashlib.sha256(manifest.read_bytes()).hexdigest())


def build_image(images: Path, *, make: Callable[[Path], None] | None = None) -> BaseImage:
    """The base image below `images`, built if it does not exist. Safe against parallel builders and kills: it appears
    by an atomic rename. `make` fills `out` below a working folder; the default is mmdebstrap.

    Raises:
        DependencyError: a program, a package source, disk space or a kernel feature is missing.
    """
    image = find_image(images)
    if image is not None:
        return image
    if make is None:
        check_builder()
    try:
        images.mkdir(parents=True, exist_ok=True)
        with locked(images / ".base.lock", limit_s=BUILD_LIMIT_S):
            image = find_image(images)
            if image is None:
                remove_leftovers(images, ".base-")
                _build(images, make or _bootstrap)
                keep_newest(images, "base-*", KEPT_IMAGES)
    except OSError as error:
        raise DependencyError(
            f"cannot build the machines' image below {images} ({error}); check space and access"
        ) from error
    image = image or find_image(images)
    assert image is not None, "a build without error leaves an image"
    return image


def _build(images: Path, make: Callable[[Path], None]) -> None:
    work = Path(tempfile.mkdtemp(prefix=".base-", dir=images))
    try:
        out = work / "out"
        out.mkdir()
        make(work)
        packages = (out / "packages").read_text().splitlines()
        manifest = {
            "recipe": recipe_digest(),
            "suite": SUITE,
            "packages": dict(line.split(" ", 1) for line in sorted(packages)),
        }
        (out / "manifest.json").write_text(json.dumps(manifest, indent=1))
        make_readable(out)
        out.rename(images / f"base-{recipe_digest()[:24]}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _bootstrap(work: Path) -> None:
    (work / "tmp").mkdir()
    if os.geteuid() != 0:
        # The builder's root is another user id outside of its namespace. The folder's name is random.
        work.chmod(0o711)
        for folder in (work / "out", work / "tmp"):
            folder.chmod(0o777)
    _run(mmdebstrap_command(), work=work)


def mmdebstrap_command() -> list[str]:
    """Wrapped so that killing the builder also ends its child processes."""
    command = [find("mmdebstrap"), "--variant=minbase", "--format=null", "--quiet"]
    command += [f"--mode={'root' if os.geteuid() == 0 else 'auto'}"]
    command += [f"--include={','.join((*DESKTOP_PACKAGES, *MACHINE_PACKAGES))}"]
    command += ['--aptopt=APT::Install-Recommends "false"']
    command += [f"--aptopt={line}" for line in host_apt_options()]
    command += [f"--dpkgopt={line}" for line in dpkg_options()]
    command += [f"--essential-hook={PREPARE_HOOK}", f"--customize-hook={FINISH_HOOK}"]
    command += [SUITE, "/dev/null", *host_sources()]
    walls = [find("setpriv"), "--pdeathsig", "KILL", "--"]
    if os.geteuid() == 0:
        walls += [find("unshare"), "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
    return [*walls, *command]


def _run(command: Sequence[str], *, work: Path) -> None:
    log = work / "log"
    environment = {"PATH": SYSTEM_PATH, "TMPDIR": str(work / "tmp"), "OUT": str(work / "out"), "LC_ALL": "C.UTF-8"}
    with log.open("wb") as file:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=BUILD_LIMIT_S,
                env=environment,
                cwd=work,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DependencyError(
                f"mmdebstrap did not end within {BUILD_LIMIT_S:g} s; is the package mirror reachable?"
            ) from error
    if done.returncode:
        said = log.read_text("utf-8", "replace").replace(PREPARE_HOOK, "...").replace(FINISH_HOOK, "...")
        tail = " ".join(said.split())[-_TAIL_CHARS:]
        hint = "" if os.geteuid() == 0 else f" ({_WITHOUT_ROOT})"
        raise DependencyError(f"mmdebstrap failed with exit status {done.returncode}{hint}: {tail}")


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(description=__doc__)
    add_json(parser)
    parser.add_argument("--state-dir", type=Path, default=Path("var/desktops"), help="the env server's state folder")
    parser.add_argument("--die-with-parent", type=int, metavar="PID", help="exit when the parent process exits")
    arguments = parser.parse_args(argv)
    parent_pid = arguments.die_with_parent
    # SIGKILL also ends mmdebstrap.
    if parent_pid is not None and not dies_with_parent(signal.SIGKILL, parent_pid=parent_pid):
        return 1
    started_at = time.monotonic()
    is_watched = parent_pid is None and not arguments.as_json and sys.stdout.isatty() and sys.stderr.isatty()
    with Console(stderr=True, quiet=not is_watched).status("building the base image, about a minute"):
        image = build_image(arguments.state_dir.absolute())
    size, seconds = image.disk.stat().st_size, time.monotonic() - started_at
    if arguments.as_json:
        print_json({"folder": image.folder, "digest": image.digest, "num_bytes": size, "seconds": round(seconds, 1)})
    else:
        print(f"{image.folder} ({size / 1e6:.0f} MB, {seconds:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(run_server_program("build-image", main, sys.argv[1:]))
