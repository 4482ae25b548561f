"""Our own files for a machine's first boot, as one tar archive that the machine reads from a second disk: so a change
of the guest agent needs a new boot, but no new build."""

import hashlib
import io
import tarfile
from pathlib import Path

from env_server.providers.base_image import GUEST_PACKAGE, GUEST_SOURCES, HOME_FOLDERS, TEXT_FILES

HOME = "home/user"
PYTHON_FOLDER = "opt/osworld-guest"
USER_ID = 1000
_NOT_COPIED = ("passwd", "group", "shadow", "sudoers", "nsswitch.conf", "shells", "timezone")
"""Files in /etc that Debian's own packages configure in a full system."""
_FAKED_PROGRAMS = ("sudo",)
"""Programs that replace the real ones on a local desktop; a machine has the real ones."""


def guest_archive() -> bytes:
    """The tar archive: the same bytes for the same files, whenever and wherever it is created."""
    files: dict[str, tuple[bytes, int]] = {
        name: (text.encode(), 0o644)
        for name, text in TEXT_FILES.items()
        if name not in {f"etc/{short}" for short in _NOT_COPIED}
    }
    for path in sorted(GUEST_SOURCES.rglob("*")):
        relative = path.relative_to(GUEST_SOURCES)
        if not path.is_file() or "__pycache__" in relative.parts:
            continue
        name = _place(relative)
        if name is not None:
            mode = 0o755 if name.startswith("usr/local/bin/") else 0o644
            files[name] = (path.read_bytes(), mode)
    files["usr/lib/python3/dist-packages/osworld-guest.pth"] = (f"/{PYTHON_FOLDER}\n".encode(), 0o644)
    folders = {f"{HOME}/{name}" for name in HOME_FOLDERS}
    for name in files:
        folders |= {str(parent) for parent in Path(name).parents if str(parent).startswith(HOME)}
    return _pack(files, sorted(folders))


def digest_of(archive: bytes) -> str:
    return hashlib.sha256(archive).hexdigest()


def _place(relative: Path) -> str | None:
    """The path of a guest source file in a machine; None if it is left out."""
    parts = relative.parts
    if parts[:2] == ("assets", "bin"):
        return None if parts[2] in _FAKED_PROGRAMS else f"usr/local/bin/{'/'.join(parts[2:])}"
    if parts[:2] == ("assets", "site"):
        return f"{PYTHON_FOLDER}/{'/'.join(parts[2:])}"
    if parts == ("assets", "menu.xml"):
        return "etc/xdg/openbox/menu.xml"
    return f"{PYTHON_FOLDER}/{GUEST_PACKAGE}/{relative.as_posix()}"


def _pack(files: dict[str, tuple[bytes, int]], folders: list[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in folders:
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(_owned(member))
        for name, (data, mode) in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), mode
            archive.addfile(_owned(member), io.BytesIO(data))
    return buffer.getvalue()


def _owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
    owner = USER_ID if member.name.startswith(HOME) else 0
    member.uid = member.gid = owner
    return member
