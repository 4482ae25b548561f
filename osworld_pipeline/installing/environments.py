"""Python environments of their own: an sglang server on a CPU, and OSWorld's desktop-env. Both pin another torch than
ours, so neither is installed next to it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from pathlib import Path

from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import DependencyError
from osworld_pipeline.policy_servers.cpu_server import cpu_server

_LISTS = Path(str(resources.files("osworld_pipeline.installing")))
_STAMP = ".setup"


@dataclass(frozen=True, kw_only=True)
class EnvironmentKind:
    """`name` is also the name of the folder with its lists."""

    name: str
    folder: Path
    """The default, relative to the working directory."""
    size: str
    pythons: str
    options: tuple[str, ...]
    """Options of `uv pip sync`."""
    wants_cpu_torch: bool = False

    @property
    def lists(self) -> tuple[Path, ...]:
        return tuple(_LISTS / self.name / f"{name}.txt" for name in ("requirements", "without-dependencies"))

    def digest(self) -> str:
        texts = [path.read_bytes() for path in (*self.lists, _LISTS / "tools.txt")]
        return sha256(b"\0".join([*texts, repr((self.pythons, self.options)).encode()])).hexdigest()


SGLANG = EnvironmentKind(
    name="sglang",
    folder=Path("var/sglang"),
    size="3 GB",
    pythons=">=3.11,<3.12",
    # Checked by hash, except PyTorch's own packages: their builds differ from machine to machine.
    options=("--verify-hashes", "--only-binary", ":all:"),
    wants_cpu_torch=True,
)
DESKTOP_ENV = EnvironmentKind(
    name="desktop-env",
    folder=Path("var/desktop-env"),
    size="1.3 GB",
    pythons=">=3.11,<3.13",
    # Those without a wheel are built, with pinned tools.
    options=(
        *("--require-hashes", "--only-binary", ":all:", "--no-binary", "fastdtw", "--no-binary", "odfpy"),
        *("--no-binary", "pydrive", "--build-constraints", str(_LISTS / "tools.txt")),
    ),
)
KINDS: Mapping[str, EnvironmentKind] = {kind.name: kind for kind in (SGLANG, DESKTOP_ENV)}


def make_environment(kind: EnvironmentKind, folder: Path, *, is_quiet: bool = True) -> bool:
    """Makes or completes the environment; returns whether there was something to do. `is_quiet`: without uv's own
    progress on standard error.

    Raises:
        DependencyError: uv, a suitable Python, the network or disk space is missing, or the environment does not load.
    """
    python, stamp = folder / "bin" / "python", folder / _STAMP
    if stamp.is_file() and stamp.read_text() == kind.digest() and _runs([python, "-c", ""]):
        return False
    if folder.exists() and not (folder / "pyvenv.cfg").exists() and any(folder.iterdir()):
        raise DependencyError(f"{folder} exists and is not a Python environment: choose another folder")
    uv = _find_uv()
    folder.parent.mkdir(parents=True, exist_ok=True)
    quietly = ["--quiet"] if is_quiet else []
    if not _runs([uv, "venv", *quietly, "--allow-existing", "--python", kind.pythons, folder]):
        raise DependencyError(f"uv found no Python {kind.pythons} for {folder}: install it, or read uv's message above")
    sync = [uv, "pip", "sync", *quietly, "--python", python, *kind.options, *kind.lists]
    if not _runs(sync, environment=_uv_environment(kind)):
        raise DependencyError(
            f"the packages could not be installed into {folder}: check the network, and that the disk has {kind.size} "
            "of free space"
        )
    if not _loads(kind, folder):
        raise DependencyError(f"{kind.name} was installed into {folder} but does not load; see above")
    stamp.write_text(kind.digest())
    return True


def _find_uv() -> str:
    local = Path(sys.executable).with_name("uv")
    found = str(local) if local.is_file() else shutil.which("uv")
    if found is None:
        raise DependencyError(f"uv is missing; run `{how_to_set_up('uv')}`")
    return found


def _uv_environment(kind: EnvironmentKind) -> Mapping[str, str]:
    """uv does not read PIP_FIND_LINKS, a folder of wheels that a closed site may have."""
    added = {}
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    if links:
        added["UV_FIND_LINKS"] = links
    if kind.wants_cpu_torch and not (links and any(Path(links).glob("torch-*.whl"))):
        added["UV_TORCH_BACKEND"] = os.environ.get("UV_TORCH_BACKEND") or "cpu"
    return added


def _loads(kind: EnvironmentKind, folder: Path) -> bool:
    if kind is SGLANG:
        server = cpu_server(folder, Path("-"), ["--help"], os.environ)
        return _runs(server.arguments, environment=server.environment, is_quiet=True)
    stubs = resources.files("env_server.providers.desktop_env") / "stubs"
    command = [folder / "bin" / "python", "-c", "import desktop_env.desktop_env"]
    return _runs(command, environment={"PYTHONPATH": str(stubs)})


def _runs(
    command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, is_quiet: bool = False
) -> bool:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if is_quiet else 2,  # standard output is for the result
            check=False,
        )
    except OSError:
        return False
    return done.returncode == 0
