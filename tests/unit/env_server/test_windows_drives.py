"""Drive C: of a local desktop with Windows programs: where its paths lead, and what it is made of."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.guest.drives import is_windows_path, unix_path
from env_server.providers.wine import ensure_prefix, link_programs, make_command

ROOT = ".wine/dosdevices/c:"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".wine/drive_c/Program Files/App").mkdir(parents=True)
    (tmp_path / ".wine/dosdevices").mkdir()
    (tmp_path / ROOT).symlink_to("../drive_c")
    (tmp_path / ROOT / "Output.txt").write_text("x")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("C:\\output.TXT", "Output.txt"),
        ("c:/Output.txt", "Output.txt"),
        ("C:\\program files\\app\\new.txt", "Program Files/App/new.txt"),
        ("C:\\\\nowhere\\\\a.txt", "nowhere/a.txt"),
        ("C:\\", ""),
    ],
)
def test_windows_path_is_found_in_any_letter_case(home: Path, path: str, place: str) -> None:
    assert is_windows_path(path)
    assert unix_path(path, home) == home / ".wine/drive_c" / place


def test_of_two_files_that_differ_in_letter_case_the_exact_one_is_meant(home: Path) -> None:
    (home / ROOT / "output.txt").write_text("y")
    assert unix_path("C:\\output.txt", home).read_text() == "y"
    assert unix_path("C:\\Output.txt", home).read_text() == "x"


@pytest.mark.parametrize("path", ["/home/user/a.txt", "~/a", "a.txt", "CC:\\a", "C:a.txt", ""])
def test_path_that_is_not_a_windows_path_is_refused(home: Path, path: str) -> None:
    assert not is_windows_path(path)
    with pytest.raises(ValueError, match="not a Windows path"):
        unix_path(path, home)


def test_path_that_climbs_out_is_refused(home: Path) -> None:
    with pytest.raises(ValueError, match="must not contain"):
        unix_path("C:\\windows\\..\\..\\..\\secret", home)


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=30))
def test_every_accepted_path_is_inside_its_drive(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    home = Path(os.sep, "nobody")
    try:
        place = unix_path(f"C:\\{text}", home)
    except ValueError:
        return
    assert place.is_relative_to(home / ROOT)
    assert ".." not in place.parts


def test_programs_that_the_host_has_become_links_and_what_was_made_here_stays(tmp_path: Path) -> None:
    host, drive = tmp_path / "host/x86_64-windows", tmp_path / "drive_c"
    (drive / "windows").mkdir(parents=True)
    host.mkdir(parents=True)
    (host / "notepad.exe").write_bytes(b"program")
    (host / "other.dll").write_bytes(b"as delivered")
    (drive / "windows/NOTEPAD.EXE").write_bytes(b"program")
    (drive / "windows/other.dll").write_bytes(b"as changed")
    (drive / "windows/win.ini").write_bytes(b"made here")
    assert link_programs(drive, [tmp_path / "host"]) == 1
    assert (drive / "windows/NOTEPAD.EXE").readlink() == host / "notepad.exe"
    assert not (drive / "windows/other.dll").is_symlink()
    assert link_programs(drive, [tmp_path / "host"]) == 0, "a link is left as it is"


KILLED = """
import os, signal, sys
from pathlib import Path
from env_server.providers.wine import ensure_prefix
def make(work):
    (work / "home/.wine/drive_c").mkdir(parents=True)
    os.kill(os.getpid(), signal.SIGKILL)
ensure_prefix(Path(sys.argv[1]), digest="a" * 64, make=make)
"""


def test_killed_build_leaves_no_partial_drive_and_the_next_build_cleans_up(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[3], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("wine-*"))
    assert list(tmp_path.glob(".wine-*/home"))

    def make(work: Path) -> None:
        (work / "home/.wine/drive_c").mkdir(parents=True)

    prefix = ensure_prefix(tmp_path, digest="a" * 64, make=make)
    assert (prefix / "drive_c").is_dir()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [prefix.name]
    assert ensure_prefix(tmp_path, digest="a" * 64, make=lambda _: pytest.fail("made twice")) == prefix


def test_wine_runs_without_access_to_the_network_and_to_the_users_home(tmp_path: Path) -> None:
    command = make_command(tmp_path)
    assert {"--unshare-net", "--unshare-pid", "--die-with-parent"} <= set(command)
    assert command[command.index("--bind") :][:3] == ["--bind", str(tmp_path / "home"), "/home/user"]
    assert command[command.index("--ro-bind") :][:3] == ["--ro-bind", "/", "/"]
