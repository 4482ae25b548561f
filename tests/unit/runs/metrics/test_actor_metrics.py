"""The metrics of rollout actors and of playbacks. No Ray is started."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from scraped import samples_of, scrape, targets_in

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.rollout.utilisation import BusyMeter
from osworld_pipeline.runs.metrics.observing import on_playback, watching_meter
from osworld_pipeline.runs.metrics.serving import (
    Current,
    Endpoint,
    endpoint_of_actors,
    observed_actor,
    observed_program,
)
from osworld_pipeline.runs.rollouts.ray_pool import PooledActor
from osworld_pipeline.wire.metrics_endpoint import TOKEN_VARIABLE, VARIABLE


def endpoint_under(setting: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> Endpoint | None:
    """The endpoint of the actors of a program with this setting."""
    monkeypatch.setenv(VARIABLE, setting)
    monkeypatch.delenv("RANK", raising=False)
    with observed_program("evaluate", {"state_root": str(root)}, lambda message: None):
        return endpoint_of_actors()


async def test_an_actor_serves_its_engine_at_a_free_port_while_its_session_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = endpoint_under("0", tmp_path, monkeypatch)
    assert endpoint is not None
    targets = StateDir(tmp_path).metrics_targets
    meter = BusyMeter(1)

    @asynccontextmanager
    async def open_session(client_id: str) -> AsyncIterator[str]:
        with watching_meter("engine", meter):
            yield client_id

    actor = PooledActor()
    await actor.open(open_session, "actor0", endpoint)
    with meter.busy():
        found = scrape(targets_in(targets)["rollout_actor"])
    await actor.close()
    assert found["osworld_busy engine"] == 1
    assert found["osworld_program  rollout_actor"] == 1
    assert list(targets.iterdir()) == []
    assert Current.metrics is None


async def test_actors_of_a_program_without_metrics_serve_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    assert endpoint_of_actors() is None
    with observed_actor(None, str):
        assert Current.metrics is None


def test_an_actor_of_a_network_is_named_by_the_address_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    endpoint = endpoint_under("0.0.0.0:0", tmp_path, monkeypatch)
    assert endpoint is not None
    targets = StateDir(tmp_path).metrics_targets
    assert "secret" not in repr(endpoint)
    with observed_actor(endpoint, lambda: "10.0.0.5"):
        assert targets_in(targets)["rollout_actor"].startswith("10.0.0.5:")


def test_actors_of_one_node_share_a_range_and_leave_a_single_port_to_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranged = endpoint_under(f"{port - 1}-{port}", tmp_path, monkeypatch)
    assert ranged is not None
    assert ranged.address.ports == range(port - 1, port + 1)
    single = endpoint_under(str(port), tmp_path, monkeypatch)
    assert single is not None
    assert single.address.ports == range(1)


def test_playbacks_are_counted_under_the_label_playback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.delenv("RANK", raising=False)
    with observed_program("verify_replay", {"state_root": str(tmp_path)}, lambda message: None):
        on_playback(Outcome.SUCCESS, num_steps=3)
        assert Current.metrics is not None
        found = samples_of(Current.metrics.text().decode())
    assert (found["osworld_episodes_ended_total success playback"], found["osworld_steps_total"]) == (1, 3)
    on_playback(Outcome.SUCCESS, num_steps=3)
