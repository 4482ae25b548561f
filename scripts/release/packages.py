"""Builds wheel and sdist, and checks that they have every tracked file of the packages and no other."""

import email
import hashlib
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.version import Version

from scripts.release.errors import ReleaseError
from scripts.release.programs import output_of
from scripts.release.texts import PROJECT

UV = Path(sys.executable).parent / "uv"
SUMS = "SHA256SUMS"
WITH_SDIST = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "pyproject.toml.orig"}
"""Files of the sdist in addition to the packages."""
BUILD_LIMIT_S = 600.0


def build(source: Path, folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist of an exported tree. uv has the build backend, so nothing is downloaded. Raises ReleaseError."""
    output_of(UV, "build", "--quiet", "--offline", "--out-dir", folder, source, cwd=source, limit_s=BUILD_LIMIT_S)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def module_names(project: str) -> Sequence[str]:
    """The packages that the wheel installs."""
    return tomllib.loads(project)["tool"]["uv"]["build-backend"]["module-name"]


def need_contents(wheel: Path, sdist: Path, wanted: set[str], version: Version) -> None:
    """`wanted`: the tracked files of the packages. Raises ReleaseError."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        found = email.message_from_bytes(archive.read(metadata))["Version"]
    if found != str(version):
        raise ReleaseError(f"{wheel.name} is of version {found}, not {version}: see the version in {PROJECT}")
    _need_same(wheel, {name for name in names if ".dist-info/" not in name}, wanted)
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    _need_same(sdist, packed, wanted | WITH_SDIST)


def _need_same(path: Path, packed: set[str], wanted: set[str]) -> None:
    if packed != wanted:
        lacks, more = sorted(wanted - packed)[:3], sorted(packed - wanted)[:3]
        raise ReleaseError(
            f"{path.name} differs from the tracked files (missing: {', '.join(lacks) or 'none'}; not tracked: "
            f"{', '.join(more) or 'none'}): see the build backend's settings in {PROJECT}"
        )


def sums_of(paths: Iterable[Path]) -> str:
    """The sums in the format of `sha256sum --check`."""
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(paths))
