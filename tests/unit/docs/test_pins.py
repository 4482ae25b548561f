"""What set-up installs is named by version and hash."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from osworld_pipeline.doctor.packages import read_pins
from osworld_pipeline.installing.environments import KINDS

ROOT = Path(__file__).resolve().parents[3]
INSTALLING = ROOT / "osworld_pipeline" / "installing"
LISTS = sorted(
    path
    for path in (ROOT / "constraints.txt", *(ROOT / "scripts").rglob("*.txt"), *INSTALLING.rglob("*.txt"))
    if not path.name.startswith("debian-packages")
)
UNHASHED = {"torch", "torchvision", "triton"}
"""Builds that differ from machine to machine."""
UV = Path(sys.executable).parent / "uv"


def pins_of(path: Path) -> dict[str, list[str]]:
    """Pin -> its hashes."""
    lines = [line for line in path.read_text().replace("\\\n", "").splitlines() if not line.startswith("#")]
    return {line.partition("--hash=")[0].strip(): re.findall(r"--hash=(\S+)", line) for line in lines}


@pytest.mark.parametrize("path", LISTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_pin_has_the_hashes_of_its_files(path: Path) -> None:
    pins = pins_of(path)
    assert pins
    for pin, hashes in pins.items():
        requirement = Requirement(pin)
        assert re.fullmatch(r"==[^*]+", str(requirement.specifier)), f"{pin} names no single version"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), pin
        assert bool(hashes) != (requirement.name in UNHASHED), pin


@pytest.mark.parametrize("path", LISTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_list_of_pins_contains_a_url(path: Path) -> None:
    assert "://" not in path.read_text()


def test_every_installation_is_checked_against_a_hashed_list() -> None:
    hashed = {"--require-hashes", "--verify-hashes", "--constraint constraints.txt"}
    for script in (*sorted((ROOT / "scripts").glob("setup*")), ROOT / "Makefile"):
        commands = re.findall(r"pip (?:install|sync) .*", script.read_text().replace("\\\n", ""))
        for command in commands:
            assert any(option in command for option in hashed), f"{script.name}: {command}"
            assert "--only-binary :all:" in command, f"{script.name}: {command}"
    for kind in KINDS.values():
        assert hashed & set(kind.options), kind.name
        assert " ".join(kind.options).startswith(("--verify-hashes --only-binary", "--require-hashes --only-binary"))


def test_doctor_reads_the_versions_of_the_hashed_list() -> None:
    pins = read_pins()
    assert {"torch", "httpx", "uvicorn"} <= pins.keys()
    assert all(re.fullmatch(r"[0-9][^\s\\]*", version) for version in pins.values())


def test_a_package_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    """A later uv could stop checking the hashes of a list of constraints, which scripts/setup uses."""
    wheel = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small.py", "")
        archive.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        archive.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("small-1.0.dist-info/RECORD", "")
    (tmp_path / "constraints.txt").write_text(f"small==1.0 --hash=sha256:{'0' * 64}\n")
    command = [
        UV,
        "pip",
        "install",
        "--no-cache",
        "--no-index",
        "--find-links",
        tmp_path,
        "--target",
        tmp_path / "site",
    ]
    done = subprocess.run(
        [*command, "--python", sys.executable, "--constraint", tmp_path / "constraints.txt", "small"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "Hash mismatch" in done.stderr
    assert not (tmp_path / "site/small.py").exists()
