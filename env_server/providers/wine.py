"""Windows programs for local desktops: drive C: of Debian's Wine, made once below the state folder and copied into the
image of every desktop. Its programs are links into /usr, which every desktop has, so it needs 3 MB instead of 700."""

import filecmp
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from env_server.providers.files import keep_newest, locked, remove_leftovers
from env_server.providers.requirements import SYSTEM_PATH
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import DependencyError

MAKE_LIMIT_S = 400.0
"""It takes a minute on a busy machine with two cores."""
KEPT_PREFIXES = 2
PREFIX_IN_HOME = "home/user/.wine"
SOURCES = (Path("/usr/lib/x86_64-linux-gnu/wine"), Path("/usr/share/wine"))
"""Debian's folders of the files that Wine copies into a drive C:."""
UPDATES = "disable\n"
_USER_ID = 1000
_PASSWD = f"user:x:{_USER_ID}:{_USER_ID}:user,,,:/home/user:/bin/sh\n"
_MAKE = "wine wineboot --init && wineserver --wait"
_ENVIRONMENT = {
    "PATH": SYSTEM_PATH,
    "HOME": "/home/user",
    "USER": "user",
    "LANG": "C.UTF-8",
    "WINEDEBUG": "-all",
    "WINEDLLOVERRIDES": "mscoree,mshtml=;winemenubuilder.exe=d",
}


def wine_version() -> str:
    """DependencyError if Wine is not installed."""
    if shutil.which("wine", path=SYSTEM_PATH) is None or not SOURCES[0].is_dir():
        raise DependencyError(
            f"Windows programs need the Debian packages wine and wine64; run `{how_to_set_up('wine')}`"
        )
    query = ["dpkg-query", "-W", "-f", "${Version}", "libwine"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False, env={"PATH": SYSTEM_PATH})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DependencyError(f"cannot query Wine's version ({error}); run `{how_to_set_up('wine')}`") from error
    return done.stdout.strip()


def wine_digest() -> str:
    """Digest of all inputs of a drive C:. Raises DependencyError as wine_version."""
    parts = [wine_version(), _MAKE, _ENVIRONMENT, _PASSWD, UPDATES]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def ensure_prefix(images: Path, *, digest: str | None = None, make: Callable[[Path], None] | None = None) -> Path:
    """The folder of a fresh `.wine` below `images`, created if it does not exist. Safe against parallel makers and
    kills: it appears by an atomic rename. `digest` names it, default wine_digest; `make` fills `home/.wine` below a
    working folder, default Wine itself.

    Raises:
        DependencyError: Wine is not installed, does not run, or disk space is missing.
    """
    prefix = images / f"wine-{(digest or wine_digest())[:24]}"
    if prefix.is_dir():
        return prefix
    try:
        images.mkdir(parents=True, exist_ok=True)
        with locked(images / ".wine.lock", limit_s=MAKE_LIMIT_S):
            if not prefix.is_dir():
                remove_leftovers(images, ".wine-")
                _make(images, prefix, make or _run)
                keep_newest(images, "wine-*", KEPT_PREFIXES)
    except OSError as error:
        raise DependencyError(
            f"cannot make Wine's drive C: below {images} ({error}); check space and access"
        ) from error
    return prefix


def install_prefix(prefix: Path, root: Path) -> None:
    """Copies it into an image that is being built."""
    shutil.copytree(prefix, root / PREFIX_IN_HOME, symlinks=True)


def _make(images: Path, prefix: Path, make: Callable[[Path], None]) -> None:
    work = Path(tempfile.mkdtemp(prefix=".wine-", dir=images))
    try:
        home = work / "home"
        home.mkdir()
        (work / "passwd").write_text(_PASSWD)
        make(work)
        made = home / ".wine"
        link_programs(made / "drive_c", SOURCES)
        # Wine compares the time in this file with that of its own files, and rebuilds everything if they differ. The
        # word `disable` prevents that.
        (made / ".update-timestamp").write_text(UPDATES)
        made.chmod(0o755)
        made.rename(prefix)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(work: Path) -> None:
    try:
        done = subprocess.run(
            make_command(work),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=MAKE_LIMIT_S,
            cwd="/",
            env=_ENVIRONMENT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DependencyError(f"Wine made no drive C: ({error}); run `{how_to_set_up('debian', 'wine')}`") from error
    if done.returncode or not (work / "home/.wine/drive_c/windows/system32").is_dir():
        said = " ".join(done.stderr.decode("utf-8", "replace").split())[-300:]
        raise DependencyError(f"Wine made no drive C: (exit status {done.returncode}): {said or 'no message'}")


def make_command(work: Path) -> list[str]:
    """Runs Wine in a separate sandbox as the desktops' user, whose name is stored in drive C: and its registry."""
    return [
        "bwrap", "--unshare-user", "--uid", str(_USER_ID), "--gid", str(_USER_ID), "--unshare-pid", "--unshare-net",
        "--unshare-ipc", "--die-with-parent", "--new-session", "--ro-bind", "/", "/", "--dev", "/dev",
        "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/home",  # noqa: S108 - empty ones inside
        "--bind", str(work / "home"), "/home/user",
        "--ro-bind", str(work / "passwd"), "/etc/passwd", "--", "/bin/sh", "-c", _MAKE,
    ]  # fmt: skip


def link_programs(drive: Path, sources: Iterable[Path]) -> int:
    """Replaces files below `drive` by links to equal files of the same name below a source. Returns how many."""
    originals: dict[str, list[Path]] = {}
    for source in sources:
        for path in sorted(source.rglob("*")):
            if path.is_file():
                originals.setdefault(path.name.lower(), []).append(path)
    num_linked = 0
    for folder, _, names in os.walk(drive):
        for name in names:
            path = Path(folder, name)
            if path.is_symlink():
                continue
            same = next((one for one in originals.get(name.lower(), ()) if filecmp.cmp(one, path, shallow=False)), None)
            if same is not None:
                path.unlink()
                path.symlink_to(same)
                num_linked += 1
    return num_linked
