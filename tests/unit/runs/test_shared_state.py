"""A state folder that hosts have at different mounts."""

import pickle
import shutil
from pathlib import Path

import pytest

from osworld_pipeline.domain.state import STATE_VARIABLE, StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.runs.rollouts.env_servers import client_name
from osworld_pipeline.runs.shared_state import SharedState, job_here, state_of


@pytest.fixture
def sent(tmp_path: Path) -> SharedState:
    """A state, as one host sends it to others."""
    state = StateDir(tmp_path / "launcher" / "var")
    state.root.mkdir(parents=True)
    return SharedState.of(state)


def mounted_elsewhere(sent: SharedState, folder: Path) -> Path:
    """The state has moved: the sender's path does not exist on this host."""
    shutil.move(sent.root, folder)
    return folder


def test_a_state_is_found_at_the_path_of_the_sender(sent: SharedState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, "/no/such/state")
    assert sent.here() == StateDir(sent.root)


def test_a_state_is_found_at_the_mount_of_this_host(
    sent: SharedState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = mounted_elsewhere(sent, tmp_path / "mnt")
    monkeypatch.setenv(STATE_VARIABLE, str(elsewhere))
    received = SharedState.from_text(pickle.loads(pickle.dumps(sent)).to_text())
    assert received.here() == StateDir(elsewhere)
    assert received.path_here(sent.root / "checkpoints" / "sft-1") == elsewhere / "checkpoints" / "sft-1"
    assert received.path_here(Path("/models/base")) == Path("/models/base")


def test_another_state_at_the_same_path_is_not_used(
    sent: SharedState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = mounted_elsewhere(sent, tmp_path / "mnt")
    SharedState.of(StateDir(sent.root))
    monkeypatch.delenv(STATE_VARIABLE, raising=False)
    with pytest.raises(StoreError, match=f"the state folder of this run is not at {sent.root} on host"):
        sent.here()
    monkeypatch.setenv(STATE_VARIABLE, str(elsewhere))
    assert sent.here().root == elsewhere


def test_a_state_that_is_at_neither_path_is_an_error_that_names_both(
    sent: SharedState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted_elsewhere(sent, tmp_path / "mnt")
    monkeypatch.setenv(STATE_VARIABLE, "/wrong")
    with pytest.raises(
        StoreError, match=f"is not at {sent.root} or /wrong on host .*set {STATE_VARIABLE} on this host"
    ):
        sent.here()


def test_a_run_has_one_name_at_env_servers_on_all_hosts(
    sent: SharedState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_name(StateDir(sent.root), "sft-1") as at_the_sender:
        pass
    monkeypatch.setenv(STATE_VARIABLE, str(mounted_elsewhere(sent, tmp_path / "mnt")))
    job = job_here({"state_root": str(sent.root)}, sent.here())
    with client_name(state_of(job), "sft-1") as here:
        assert here == at_the_sender


def test_a_job_without_a_state_stays_unchanged(sent: SharedState) -> None:
    assert job_here({"act": "sum"}, sent.here()) == {"act": "sum"}
