"""`requires-python` in pyproject.toml is the only declaration of the Pythons that are supported."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from osworld_pipeline.doctor.packages import check_python
from osworld_pipeline.domain.finding import Status

ROOT = Path(__file__).resolve().parents[3]
REQUIRED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
PROGRAMS = ("bash", "cat", "cut", "dirname", "grep", "rm", "sed", "seq", "sha256sum")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with only the files that scripts/setup reads before it makes an environment."""
    for name in ("scripts/setup", "osworld_pipeline/installing/debian.sh", "osworld_pipeline/installing/tools.txt",
                 "pyproject.toml", "constraints.txt"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def set_up(checkout: Path, pythons: dict[str, str], *parts: str) -> str:
    """The output of scripts/setup for `parts` (by default `python`) where these programs are the only Pythons. Each is
    the real one, but reports this version and makes no environment."""
    programs = checkout / "programs"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).symlink_to(str(shutil.which(name)))
    (programs / "id").write_text("#!/bin/sh\necho 1000\n")
    for name, version in pythons.items():
        stand_in = f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0); exec(sys.argv[1])"
        (programs / name).write_text(
            f"#!/bin/sh\ncase $1 in --version) echo Python {version} ;;\n"
            f"-c) exec {sys.executable} -c '{stand_in}' \"$2\" ;;\n*) exit 1 ;; esac\n"
        )
    for path in programs.iterdir():
        if not path.is_symlink():
            path.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    done = subprocess.run(
        ["bash", checkout / "scripts/setup", *(parts or ("python",))], env={**variables, "PATH": str(programs)},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    return done.stderr


def test_set_up_takes_the_oldest_python_that_is_supported(checkout: Path) -> None:
    said = set_up(checkout, {"python3": "3.10", "python3.13": "3.13", "python3.14": "3.14"})
    assert "creating .venv with Python 3.13\n" in said


@pytest.mark.parametrize("version", ["3.10", "3.15"])
def test_set_up_refuses_a_python_that_is_not_supported(checkout: Path, version: str) -> None:
    assert f"no Python {REQUIRED} found" in set_up(checkout, {"python3": version})


def test_the_doctor_refuses_a_python_that_is_not_supported() -> None:
    found = check_python("python", "3.10.1")
    assert (found.status, "is required" in found.message) == (Status.MISSING, True)


def test_the_doctor_accepts_the_python_of_the_tests() -> None:
    assert check_python("python").status == Status.OK


def test_without_a_supported_python_debians_is_installed_before_an_environment_is_made(checkout: Path) -> None:
    """The installation of its packages is refused, because there is no dpkg here."""
    said = set_up(checkout, {"python3": "3.10"}, "debian", "python")
    assert "no dpkg here" in said
    assert "no Python" not in said


def test_an_environment_is_made_at_once_where_a_python_is_supported(checkout: Path) -> None:
    said = set_up(checkout, {"python3": "3.13"}, "debian", "python")
    assert "creating .venv with Python 3.13" in said
    assert "no dpkg here" not in said
