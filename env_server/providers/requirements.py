"""The host's requirements for a local desktop: everything that is missing is a DependencyError that names the package
or the setting and the command to fix it."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import DependencyError

PROGRAMS: Mapping[str, str] = {
    "bwrap": "bubblewrap",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "Xvfb": "xvfb",
    "xkbcomp": "x11-xkb-utils",
    "openbox": "openbox",
    "dbus-daemon": "dbus",
    "xterm": "xterm",
    "mousepad": "mousepad",
    "pcmanfm": "pcmanfm",
    "yad": "yad",
    "python3": "python3",
    "xdg-open": "xdg-utils",
    "gsettings": "libglib2.0-bin",
    "ps": "procps",
}
"""Program on PATH -> the Debian package that contains it."""

MODULES: Mapping[str, str] = {"Xlib": "python3-xlib", "PIL": "python3-pil", "gi": "python3-gi"}
"""Module of the system's Python -> its Debian package."""

FILES: Mapping[str, str] = {
    "/usr/libexec/at-spi-bus-launcher": "at-spi2-core",
    "/usr/share/fonts/truetype/dejavu/DejaVuSansMono.ttf": "fonts-dejavu-core",
    "/usr/share/icons/Adwaita/index.theme": "adwaita-icon-theme",
}

OPTIONAL_PACKAGES = ("chromium", "ffmpeg", "socat")
"""Packages for recordings, and for the browser of OSWorld's tasks; both are optional."""

VERSIONED_PACKAGES = (
    *sorted({*PROGRAMS.values(), *MODULES.values(), *FILES.values()}),
    *("libgtk-3-0", *OPTIONAL_PACKAGES),
)
"""Packages whose versions affect how desktops look or behave."""

SYSTEM_PYTHON = "/usr/bin/python3"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_QUERY_LIMIT_S = 60
CAP_SYS_ADMIN = 21
"""capabilities(7)."""

_NAMESPACE_SETTINGS = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
)
"""Setting below /proc/sys, the value that forbids user namespaces, the command that allows them."""


def check_programs() -> None:
    """Raises a DependencyError that names every missing Debian package at once."""
    missing = {package for program, package in PROGRAMS.items() if shutil.which(program, path=SYSTEM_PATH) is None}
    missing |= {package for path, package in FILES.items() if not Path(path).exists()}
    if "python3" not in missing:
        missing |= _missing_modules()
    if missing:
        names = " ".join(sorted(missing))
        raise DependencyError(f"a local desktop lacks the Debian packages {names}; run `{how_to_set_up('debian')}`")


def _missing_modules() -> set[str]:
    code = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    found = _query([SYSTEM_PYTHON, "-Ic", code, *MODULES])
    return {MODULES[name] for name in found.split()}


def package_versions() -> dict[str, str]:
    """Debian package -> version, for installed packages."""
    if shutil.which("dpkg-query", path=SYSTEM_PATH) is None:
        raise DependencyError("a local desktop needs Debian or Ubuntu (there is no dpkg-query); use another provider")
    listing = _query(["dpkg-query", "-W", "-f", "${binary:Package} ${Version}\n", *VERSIONED_PACKAGES], may_fail=True)
    pairs = (line.split() for line in listing.splitlines())
    return {pair[0].partition(":")[0]: pair[1] for pair in pairs if len(pair) == 2}


def try_sandbox(command: Sequence[str], *, limit_s: float) -> None:
    """Runs the command of a sandbox that ends by itself.

    Raises:
        DependencyError: the sandbox was not created; names the setting if the machine forbids it.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            cwd="/",
            env={"PATH": SYSTEM_PATH},
            check=False,
        )
    except OSError as error:
        raise DependencyError(f"cannot start bubblewrap ({error}); run `{how_to_set_up('debian')}`") from error
    except subprocess.TimeoutExpired as error:
        raise DependencyError(
            f"bubblewrap did not create a sandbox within {limit_s:g} s; check the load of the machine"
        ) from error
    if done.returncode:
        raise explain_namespaces(done.stderr.decode("utf-8", "replace"))


def explain_namespaces(complaint: str, *, proc: Path = Path("/proc")) -> DependencyError:
    """Why a sandbox cannot be made here, and the setting that would allow it."""
    for name, forbidding, remedy in _NAMESPACE_SETTINGS:
        path = proc / "sys" / name
        if path.exists() and path.read_text().strip() == forbidding:
            setting = name.replace("/", ".")
            return DependencyError(
                f"this machine forbids unprivileged user namespaces ({setting}={forbidding}), which the sandbox "
                f"needs; allow them with `sudo {remedy}`"
            )
    said = f"bubblewrap cannot make a sandbox here ({complaint.strip()[-300:] or 'no message'})"
    if _is_root_without_mounts(proc / "self/status"):
        return DependencyError(
            f"{said}: root has no right to mount in this container; start the server as an ordinary user, or the "
            "container with --cap-add SYS_ADMIN"
        )
    return DependencyError(
        f"{said}; in a container, allow user namespaces and mounts: --security-opt seccomp=unconfined and, for Docker, "
        "--security-opt systempaths=unconfined, for Podman --security-opt unmask=ALL"
    )


def _is_root_without_mounts(status: Path) -> bool:
    """`status`: the process's file in /proc (proc_pid_status(5))."""
    found = dict(line.split(":", 1) for line in status.read_text().splitlines())
    is_root = found["Uid"].split()[1] == "0"
    return is_root and not int(found["CapEff"], 16) >> CAP_SYS_ADMIN & 1


def _query(argv: Sequence[str], *, may_fail: bool = False) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_QUERY_LIMIT_S, check=False, env={"PATH": SYSTEM_PATH}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DependencyError(f"cannot run {argv[0]} ({error}); run `{how_to_set_up('debian')}`") from error
    if done.returncode and not may_fail:
        raise DependencyError(f"{argv[0]} failed ({done.stderr.strip()[-200:]}); run `{how_to_set_up('debian')}`")
    return done.stdout
