"""File systems without locks, read-only ones, and ones with locks of one host: each is reported with one sentence."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from episode_samples import make_episode

from osworld_pipeline.doctor.machine import check_file_system
from osworld_pipeline.domain.finding import Status
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.file_system import local_locks, need_file_system
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog

NO_FLOCK = """
import ctypes, errno, platform, struct, sys
number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
# Load the call's number; where it is flock return ENOLCK, else allow.
rules = ((0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.ENOLCK), (0x06, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
class Filter(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
filter = Filter(len(rules), ctypes.addressof(program))
assert libc.prctl(22, 2, ctypes.byref(filter)) == 0
"""
ACT = """
from pathlib import Path
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.doctor.machine import check_file_system
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.store import TrajectoryStore
state = StateDir(Path(sys.argv[1]))
def attempt(name, act):
    try:
        print(name, act())
    except PipelineError as error:
        print(name, error)
attempt("doctor:", lambda: check_file_system("file-system", state).message)
attempt("rebuild:", lambda: rebuild_catalog(state))
attempt("query:", lambda: run_query(state, "SELECT count(*) FROM episodes").rows)
attempt("read:", lambda: len(TrajectoryStore(state).existing_parts()))
"""


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "state")
    TrajectoryStore(state).write_episodes("a", [make_episode("a")])
    rebuild_catalog(state)
    return state


def run(command: list[str]) -> dict[str, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return {name: rest for name, _, rest in (line.partition(": ") for line in done.stdout.splitlines())}


def test_a_file_system_without_locks_is_reported_with_one_sentence_wherever_a_lock_is_needed(state: StateDir) -> None:
    said = run([sys.executable, "-c", f"{NO_FLOCK}{ACT}", str(state.root)])
    assert said["doctor"].startswith(f"the file system of {state.root} has no locks (flock")
    assert "has no locks (flock: No locks available): keep the state on a local disk" in said["rebuild"]
    assert (said["query"], said["read"]) == ("[(1,)]", "1")


def test_a_read_only_state_can_be_read_and_refuses_writes_with_one_sentence(state: StateDir) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    if subprocess.run([*unshare, mount, "sh", state.root, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no mount namespace")
    said = run([*unshare, mount, "sh", str(state.root), sys.executable, "-c", f"import sys{ACT}", str(state.root)])
    assert said["doctor"] == f"the file system of {state.root} is read-only"
    assert said["rebuild"].endswith("catalog.lock is read-only: choose a folder that can be written")
    assert (said["query"], said["read"]) == ("[(1,)]", "1")


@pytest.mark.parametrize(
    "words",
    [
        ["compact"],
        ["collect-garbage"],
        ["rebuild-catalog"],
        ["checkpoint", "add", "https://models.example/v1#m"],
        ["import", "slime-replay", "rows.jsonl", "--name", "mine", "--licence", "mit"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_that_writes_is_refused_before_it_starts(state: StateDir, words: list[str]) -> None:
    (state.root.parent / "rows.jsonl").write_text("")
    command = [sys.executable, "-c", f"{NO_FLOCK}from osworld_pipeline.cli import main; main()", *words]
    done = subprocess.run(
        [*command, "--state", str(state.root)], cwd=state.root.parent, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    sentence = "".join(done.stderr.split())  # a console breaks long lines, and paths too
    assert sentence.startswith(f"StoreError:thefilesystemof{state.root}hasnolocks(")


@pytest.mark.parametrize(
    ("refused", "reported"),
    [
        (BlockingIOError(errno.EAGAIN, "held"), ""),
        (OSError(errno.EBADF, "Bad file descriptor"), "cannot lock"),
        (OSError(errno.ENOLCK, "No locks available"), "has no locks"),
        (None, "grants one lock to two holders"),
    ],
)
def test_locks_count_as_working_only_if_a_second_holder_has_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: OSError | None, reported: str
) -> None:
    num_calls = 0

    def flock(descriptor: int, operation: int) -> None:
        nonlocal num_calls
        num_calls += 1
        # On NFS an exclusive lock needs a descriptor that can write.
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
        if num_calls == 2 and refused is not None:
            raise refused

    (tmp_path / "tables").mkdir()  # as in a state that others may use
    monkeypatch.setattr(fcntl, "flock", flock)
    if not reported:
        need_file_system(tmp_path)
        return
    with pytest.raises(StoreError, match=reported):
        need_file_system(tmp_path)


def test_a_good_file_system_passes_and_no_file_is_left(tmp_path: Path) -> None:
    need_file_system(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert check_file_system("file-system", StateDir(tmp_path / "not" / "yet")).status in (Status.OK, Status.WARN)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ("rw,vers=3,nolock", "nolock"),
        ("rw,vers=4.2,local_lock=flock", "local_lock=flock"),
        ("rw,localflock", "localflock"),  # Lustre
        ("rw,local_lock=none", ""),
    ],
)
def test_locks_of_one_host_are_recognised_by_the_mount_options(tmp_path: Path, options: str, reported: str) -> None:
    folder = tmp_path / "a b" / "state"
    folder.mkdir(parents=True)
    mounts = tmp_path / "mounts"
    name = str(folder.parent).replace(" ", "\\040")
    mounts.write_text(f"/dev/vda / ext4 rw,nolock 0 0\nserver:/x {name} nfs4 {options} 0 0\n")
    assert local_locks(folder, mounts) == reported
    assert local_locks(tmp_path, mounts) == ""
