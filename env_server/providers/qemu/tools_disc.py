"""The disc with a guest's tools: an ISO image with Joliet names, made by genisoimage from a few files."""

import hashlib
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from env_server.providers.files import keep_newest, locked, remove_leftovers, write_whole
from env_server.providers.qemu.programs import find
from osworld_pipeline.errors import DependencyError

LABEL = "OSWORLD"
WINDOWS_TOOLS = Path(__file__).parent / "windows_tools"
KEPT_DISCS = 4
_LIMIT_S = 60.0


def windows_files() -> dict[str, bytes]:
    """The files that Windows runs from the disc, with the line ends that its command interpreter needs."""
    return {
        path.name: path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        for path in sorted(WINDOWS_TOOLS.iterdir())
    }


def ensure_disc(images: Path, files: Mapping[str, bytes]) -> Path:
    """The ISO below `images`, created if it does not exist; it appears by an atomic rename. DependencyError if it
    cannot be created."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name} {len(data)}\0".encode() + data)
    disc = images / f"tools-{digest.hexdigest()[:24]}.iso"
    if not disc.exists():
        images.mkdir(parents=True, exist_ok=True)
        with locked(images / ".tools.lock", limit_s=_LIMIT_S):
            remove_leftovers(images, ".tools-")
            with tempfile.TemporaryDirectory(prefix=".tools-", dir=images) as folder:
                write_whole(disc, _make(Path(folder), files))
        keep_newest(images, "tools-*.iso", KEPT_DISCS)
    return disc


def _make(folder: Path, files: Mapping[str, bytes]) -> bytes:
    content, disc = folder / "content", folder / "disc.iso"
    content.mkdir()
    for name, data in files.items():
        (content / name).write_bytes(data)
    command = [find("genisoimage"), "-quiet", "-J", "-R", "-V", LABEL, "-o", str(disc), str(content)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise DependencyError(f"genisoimage failed: {error.stderr.strip()[-300:]}") from error
    except subprocess.TimeoutExpired as error:
        raise DependencyError(f"genisoimage did not end within {_LIMIT_S:g} s") from error
    return disc.read_bytes()
