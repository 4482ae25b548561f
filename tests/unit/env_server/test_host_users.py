"""Every local desktop of a server that is root has a host user of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from env_server.providers.host_users import HostUsers
from osworld_pipeline.errors import DependencyError

UIDS = range(1_999_000_000 + 8 * os.getpid(), 1_999_000_000 + 8 * os.getpid() + 3)
"""Of this test process alone."""


def open_with_map(tmp_path: Path, uid_map: str) -> HostUsers:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    (tmp_path / "uid_map").write_text(uid_map)
    return HostUsers.open(uid_map=tmp_path / "uid_map")


def claimed(users: HostUsers) -> int | None:
    uid = users.claim()
    users.release(uid)
    return uid


def test_no_two_claims_have_one_id_and_a_used_up_range_is_an_error() -> None:
    users, others = HostUsers(UIDS), HostUsers(UIDS)
    held = [users.claim(), others.claim(), users.claim()]
    assert set(held) == set(UIDS)
    with pytest.raises(DependencyError, match=rf"all 3 host users of local desktops \({UIDS[0]} to .* are used; stop"):
        others.claim()
    others.release(held[1])
    assert users.claim() == held[1]
    for uid in held:
        users.release(uid)


def test_an_id_is_used_again_only_after_all_others() -> None:
    users = HostUsers(UIDS)
    uids = [claimed(users) for _ in range(6)]
    assert set(uids[:3]) == set(UIDS)
    assert uids[:3] == uids[3:]


def test_a_killed_process_frees_its_ids() -> None:
    code = (
        "import sys, time; from env_server.providers.host_users import HostUsers; "
        f"users = HostUsers({UIDS!r}); [users.claim() for _ in range(3)]; print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(DependencyError):
            HostUsers(UIDS).claim()
        process.kill()
    assert claimed(HostUsers(UIDS)) in UIDS


@pytest.mark.parametrize(
    ("uid_map", "uids"),
    [
        ("0 0 4294967295\n", range(1_500_000_000, 1_500_004_096)),
        ("0 100000 65536\n", range(60_706, 61_184)),
        ("0 1000 1\n", None),
    ],
    ids=["the host", "a container with 65,536 ids", "a namespace with one id"],
)
def test_ids_are_taken_from_what_is_mapped(tmp_path: Path, uid_map: str, uids: range | None) -> None:
    uid = claimed(open_with_map(tmp_path, uid_map))
    assert uid is None if uids is None else uid in uids


def test_root_without_a_second_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match="start the env server as another user"):
        open_with_map(tmp_path, "0 0 1\n")
