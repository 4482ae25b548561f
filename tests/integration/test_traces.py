"""One trace of an episode through the processes that make it: the rollout here, an env server with real desktops, and a
policy server over HTTP."""

import asyncio
from pathlib import Path

import pytest
from env_server_process import running_env_server
from trace_collector import collecting_traces, tracing_to

from osworld_pipeline.domain.task import Task
from osworld_pipeline.evaluation.suites import build_suite
from osworld_pipeline.rollout import env_fleet
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.wire import EnvConfig
from osworld_pipeline.wire.tracing import episode_span, span

pytestmark = [pytest.mark.desktop, pytest.mark.slow]

SCREEN = (512, 320)


async def play(url: str, task: Task) -> None:
    async with EnvClient(url, env_config=EnvConfig(screen_size=SCREEN), client_id="test") as client:
        with episode_span("e1", {}):
            desktop = client.desktop()
            with span("reset"):
                await desktop.reset(task, record_id="e1")
            await desktop.act("WAIT", pause_s=0.1)
            await desktop.score()
            await desktop.close()


def test_what_an_env_server_does_for_an_episode_is_in_the_episodes_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_fleet, "LOOK_INTERVAL_S", 0.01)  # the polls of the server are not in the trace
    (item,) = build_suite(seed=0, families=["rename_folder"], num_train=1, num_heldout=1, screen=SCREEN).train
    size = f"{SCREEN[0]}x{SCREEN[1]}"
    with (
        collecting_traces() as collector,
        tracing_to(collector.url),
        running_env_server(tmp_path, "--screen-size", size, num_replicas=1) as server,
    ):
        asyncio.run(play(server.url, item.task))
    served = "POST /reset", "POST /step", "POST /evaluate", "POST /close"
    assert [one for one in collector.tree("e1") if one.startswith("?")] == []
    assert {one.service for one in collector.spans if one.name in served} == {"osworld-env-server"}
    assert set(collector.tree("e1")) == {
        "episode",
        "episode/reset",
        *(f"episode/reset/POST /reset{part}" for part in ("", "/queue", "/reset", "/observe", "/encode")),
        *(f"episode/POST /step{part}" for part in ("", "/act", "/observe", "/encode")),
        *(f"episode/POST /evaluate{part}" for part in ("", "/evaluate")),
        "episode/POST /close",
    }
    (set_up,) = [one for one in collector.spans if one.name == "reset" and one.service == "osworld-env-server"]
    assert 0 < set_up.seconds < 60
