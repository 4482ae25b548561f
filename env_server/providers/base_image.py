"""The files a local desktop starts from: a small root without /usr, which is the host's. Built once under the state
folder, named by the digest of all its inputs."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from env_server.providers.requirements import SYSTEM_PATH, SYSTEM_PYTHON, check_programs, package_versions
from env_server.providers.wine import ensure_prefix, install_prefix, wine_digest
from osworld_pipeline.errors import DependencyError

GUEST_SOURCES = Path(__file__).parent.parent / "guest"
GUEST_PACKAGE = "osworld_guest"
HOST_NAME = "desktop"
HOME_FOLDERS = ("Desktop", "Documents", "Downloads", "Music", "Pictures", "Public", "Templates", "Videos")
STALE_BUILD_S = 3600.0

COPIED_FROM_ETC = (
    "alternatives", "dbus-1", "debian_version", "fonts", "gtk-2.0", "gtk-3.0", "ld.so.cache", "libfm", "magic",
    "mailcap", "mime.types", "protocols", "python3", "python3.*", "services", "terminfo", "X11/app-defaults",
    "X11/rgb.txt", "xdg/libfm", "xdg/pcmanfm", "xdg/menus", "xdg/mousepad",
)  # fmt: skip
"""Debian's own public configuration below /etc, without files that an administrator edits."""

_PASSWD = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user,,,:/home/user:/bin/bash\n" + (
    "messagebus:x:100:107::/nonexistent:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
)
_GROUP = "root:x:0:\ntty:x:5:\nsudo:x:27:user\nusers:x:100:\nmessagebus:x:107:\nuser:x:1000:\nnogroup:x:65534:\n"
_BASHRC = """\
case $- in *i*) ;; *) return ;; esac
HISTCONTROL=ignoreboth
HISTSIZE=1000
shopt -s checkwinsize
PS1='\\u@\\h:\\w\\$ '
alias ls='ls --color=auto'
alias grep='grep --color=auto'
alias ll='ls -alF'
"""
_PROFILE = """\
export PATH="/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
[ -n "$BASH_VERSION" ] && [ -f "$HOME/.bashrc" ] && . "$HOME/.bashrc"
"""
_CHROMIUM_FLAGS = (
    # The sandbox is around the whole desktop, and programs inside cannot create further ones.
    "--no-sandbox --test-type --disable-dev-shm-usage --disable-gpu --no-first-run --no-default-browser-check "
    "--password-store=basic --disable-sync --disable-background-networking --disable-component-update "
    "--force-renderer-accessibility --user-data-dir=$HOME/.config/google-chrome"
)
"""Remote debugging needs a named profile folder; OSWorld's graders look in this one."""
_CHROMIUM = f'export CHROMIUM_FLAGS="$CHROMIUM_FLAGS {_CHROMIUM_FLAGS}" GNOME_ACCESSIBILITY=1\n'
_USER_DIRS = "".join(
    f'XDG_{key}_DIR="$HOME/{name}"\n'
    for key, name in (
        ("DESKTOP", "Desktop"), ("DOCUMENTS", "Documents"), ("DOWNLOAD", "Downloads"), ("MUSIC", "Music"),
        ("PICTURES", "Pictures"), ("PUBLICSHARE", "Public"), ("TEMPLATES", "Templates"), ("VIDEOS", "Videos"),
    )
)  # fmt: skip
_TEXT_TYPES = ("plain", "csv", "html", "markdown", "x-log", "x-python", "x-script.python", "xml")
_MIMEAPPS = "[Default Applications]\ninode/directory=pcmanfm.desktop\n" + "".join(
    f"{kind}=org.xfce.mousepad.desktop\n"
    for kind in (*(f"text/{name}" for name in _TEXT_TYPES), "application/json", "application/x-shellscript")
)

TEXT_FILES: dict[str, str] = {
    "etc/passwd": _PASSWD,
    "etc/group": _GROUP,
    "etc/shadow": "root:*:19000:0:99999:7:::\nuser:*:19000:0:99999:7:::\n",
    "etc/hostname": f"{HOST_NAME}\n",
    "etc/hosts": f"127.0.0.1\tlocalhost\n127.0.1.1\t{HOST_NAME}\n::1\tlocalhost\n",
    "etc/nsswitch.conf": "".join(f"{name}: files\n" for name in ("passwd", "group", "shadow", "hosts", "services")),
    "etc/resolv.conf": "",
    "etc/machine-id": "6f73776f726c64000000000000000001\n",
    "etc/timezone": "Etc/UTC\n",
    "etc/shells": "/bin/sh\n/bin/bash\n/usr/bin/bash\n/bin/dash\n",
    "etc/sudoers": "root ALL=(ALL:ALL) ALL\n%sudo ALL=(ALL:ALL) ALL\n",
    "etc/default/locale": "LANG=C.UTF-8\n",
    "etc/profile": _PROFILE,
    "etc/bash.bashrc": _BASHRC,
    "etc/chromium.d/desktop": _CHROMIUM,
    "etc/skel/.bashrc": _BASHRC,
    "home/user/.bashrc": _BASHRC,
    "home/user/.profile": _PROFILE,
    "home/user/.config/user-dirs.dirs": _USER_DIRS,
    "home/user/.config/mimeapps.list": _MIMEAPPS,
}
FOLDERS = (
    *("mnt", "media", "srv", "root", "var/tmp", "var/log", "var/lib/xkb", "var/lib/dbus", "var/cache"),
    *("opt/local/games", "opt/local/sbin", "opt/local/share/fonts"),
    *(f"home/user/{name}" for name in HOME_FOLDERS),
)


def image_digest(*, wine: bool = False) -> str:
    """SHA-256 over our own files and the versions of the Debian programs a desktop consists of."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in _guest_files():
        digest.update(f"\0{path.relative_to(GUEST_SOURCES)}\0".encode() + path.read_bytes())
    for package, version in sorted(package_versions().items()):
        digest.update(f"\0{package}={version}".encode())
    if wine:
        digest.update(f"\0wine={wine_digest()}".encode())
    return digest.hexdigest()


def ensure_image(images: Path, digest: str, *, wine: bool = False) -> Path:
    """The image's folder below `images`, built if it does not exist, with Windows programs if `wine`. Safe against
    parallel builders and kills: a finished build appears by an atomic rename."""
    image = images / digest[:24]
    if image.is_dir():
        return image
    check_programs()
    try:
        images.mkdir(parents=True, exist_ok=True)
        _remove_stale_builds(images)
        build = Path(tempfile.mkdtemp(prefix=".build-", dir=images))
    except OSError as error:
        raise DependencyError(
            f"cannot make the desktop image below {images} ({error}); check space and access"
        ) from error
    try:
        _build(build, wine_prefix=ensure_prefix(images) if wine else None)
        build.chmod(0o755)
        build.rename(image)
    except (OSError, subprocess.SubprocessError) as error:
        if not image.is_dir():  # else another builder was first, and its image is equal
            raise DependencyError(
                f"cannot make the desktop image in {image} ({error}); check space and access"
            ) from error
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return image


def _guest_files() -> Iterable[Path]:
    return sorted(p for p in GUEST_SOURCES.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def _build(root: Path, *, wine_prefix: Path | None) -> None:
    for name in FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(os.readlink(f"/{name}"))
    for pattern in COPIED_FROM_ETC:
        for source in Path("/etc").glob(pattern):
            _copy(source, root / source.relative_to("/"))
    _copy(Path("/var/cache/fontconfig"), root / "var/cache/fontconfig")
    for name, text in TEXT_FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "etc/os-release").symlink_to("../usr/lib/os-release")
    (root / "etc/localtime").symlink_to("/usr/share/zoneinfo/Etc/UTC")
    (root / "var/run").symlink_to("/run")
    (root / "var/lib/dbus/machine-id").symlink_to("/etc/machine-id")
    if wine_prefix is not None:
        install_prefix(wine_prefix, root)
    _install_guest(root)


def _install_guest(root: Path) -> None:
    """Our own programs, below opt/local, which a desktop sees as /usr/local."""
    version = subprocess.run(
        [SYSTEM_PYTHON, "-Ic", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout.strip()  # fmt: skip
    site = root / f"opt/local/lib/python{version}/dist-packages"
    shutil.copytree(GUEST_SOURCES, site / GUEST_PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "bin", "site"))
    for module in (GUEST_SOURCES / "assets/site").iterdir():
        if module.is_file():
            shutil.copy(module, site / module.name)
    shutil.copytree(GUEST_SOURCES / "assets/bin", root / "opt/local/bin")
    (root / "opt/local/bin/python").symlink_to(SYSTEM_PYTHON)
    openbox = root / "etc/xdg/openbox"
    openbox.mkdir(parents=True, exist_ok=True)
    shutil.copy(GUEST_SOURCES / "assets/menu.xml", openbox / "menu.xml")
    subprocess.run(
        [SYSTEM_PYTHON, "-Im", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(site)],
        check=True, timeout=120, env={"PATH": SYSTEM_PATH}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    link = root / "opt/osworld-guest"
    link.symlink_to(f"/usr/local/lib/python{version}/dist-packages")
    for folder, _, names in os.walk(root):
        Path(folder).chmod(0o755)
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o755 if os.access(path, os.X_OK) else 0o644)


def _copy(source: Path, target: Path) -> None:
    """Copies readable files; files that only the administrator can read are left out."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError, PermissionError, shutil.Error):
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        elif source.exists() or source.is_symlink():
            shutil.copy2(source, target, follow_symlinks=False)


def _remove_stale_builds(images: Path) -> None:
    for path in images.glob(".build-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > STALE_BUILD_S:
                shutil.rmtree(path, ignore_errors=True)
