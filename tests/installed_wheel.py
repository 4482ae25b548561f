"""Builds wheel and sdist, and runs programs of an installed wheel where no checkout is on the search path."""

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).parent / "uv"
LIMIT_S = 300.0
OURS = ("OSWORLD_", "DAGSTER_", "PYTHON", "ENV_SERVER", "SGLANG", "VIRTUAL_ENV")


def run(*words: object, cwd: Path, limit_s: float = LIMIT_S, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command without variables that point to a checkout or to another environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**kept, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "COLUMNS": "200", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def succeed(*words: object, cwd: Path, limit_s: float = LIMIT_S, **variables: str) -> str:
    done = run(*words, cwd=cwd, limit_s=limit_s, **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Builds wheel and sdist. uv contains the build backend, so nothing is downloaded."""
    succeed(UV, "build", "--quiet", "--offline", "--out-dir", folder, ROOT, cwd=folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    def command(self, *words: object, cwd: Path, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Runs `osworld-pipeline` with these arguments."""
        return run(self.root / "bin" / "osworld-pipeline", *words, cwd=cwd, limit_s=limit_s)

    @classmethod
    def with_extras(cls, wheel: Path, root: Path, extras: str) -> "Installed":
        """Installs the wheel and its dependencies, in the tested versions, from the ordinary package index. torch is
        the CPU build unless a folder of wheels has another."""
        installed = cls(root)
        links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or ""
        torch = {"UV_FIND_LINKS": links} if links else {"UV_TORCH_BACKEND": "cpu"}
        succeed(UV, "venv", "--quiet", "--python", sys.executable, root, cwd=root.parent)
        succeed(UV, "pip", "install", "--quiet", "--only-binary", ":all:", "--constraint", ROOT / "constraints.txt",
                "--python", installed.python, f"{wheel}[{extras}]", cwd=root, limit_s=600.0, **torch)  # fmt: skip
        return installed

    @classmethod
    def with_present_packages(cls, wheel: Path, root: Path) -> "Installed":
        """Uses the dependencies that this interpreter has: a .pth adds its site-packages. The .pth files in there,
        including that of an editable installation, are not read."""
        installed = cls(root)
        succeed(UV, "venv", "--quiet", "--python", sys.executable, root, cwd=root.parent)
        succeed(
            UV, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", installed.python, wheel, cwd=root
        )
        (site,) = root.glob("lib/python*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return installed
