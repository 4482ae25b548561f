"""On real desktops over HTTP: the oracle of every instance earns 1, doing nothing earns 0."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from osworld_pipeline.datasets.demonstrations import Demonstration
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.suites import FAMILIES, SUITES, OracleStep, SuiteTask, build_suite
from osworld_pipeline.evaluation.suites.family import Way
from osworld_pipeline.evaluation.suites.suite import SHORTCUTS
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers, ServerSpec, embedded_env_server
from osworld_pipeline.runs.sources.record_demonstrations import play_episode, record
from osworld_pipeline.wire import EnvConfig

pytestmark = [pytest.mark.desktop, pytest.mark.slow, pytest.mark.timeout(120)]

SCREEN = (512, 320)
NUM_REPLICAS = 6
NUM_INSTANCES = 8
PAUSE_S = 0.3
AGENT = load_recipe("smoke").agent
SAY_DONE = OracleStep(description="Done", arguments={"action": "terminate", "status": "success"})
GIVE_UP = OracleStep(description="Not possible", arguments={"action": "terminate", "status": "failure"})


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvServers]:
    state = StateDir(tmp_path_factory.mktemp("oracles"))
    with embedded_env_server(server_spec(state, SCREEN)) as running:
        yield running


def server_spec(state: StateDir, screen: tuple[int, int]) -> ServerSpec:
    return ServerSpec(state=state, num_replicas=NUM_REPLICAS, screen_width=screen[0], screen_height=screen[1])


def client_of(servers: EnvServers) -> EnvClient:
    return EnvClient(servers.urls, token=servers.token, env_config=EnvConfig(require_a11y_tree=False))


def instances_of(family: str) -> tuple[SuiteTask, ...]:
    # 7 + 1: the held-out one is among the first eight for any recipe.
    suite = build_suite(seed=0, families=[family], num_train=NUM_INSTANCES - 1, num_heldout=1, screen=SCREEN)
    return (*suite.train, *suite.heldout)


async def play_all(
    servers: EnvServers, episodes: list[tuple[SuiteTask, tuple[OracleStep, ...]]], *, pause_s: float = PAUSE_S
) -> list[Demonstration]:
    slots = asyncio.Semaphore(NUM_REPLICAS)
    async with client_of(servers) as client:

        async def play(item: SuiteTask, steps: tuple[OracleStep, ...]) -> Demonstration:
            async with slots:
                return await play_episode(item.task, steps, desktop=client.desktop(), agent=AGENT, pause_s=pause_s)

        return await asyncio.gather(*(play(item, steps) for item, steps in episodes))


def rewards_by_task(episodes: list[Demonstration]) -> dict[str, float]:
    return {episode.task_id: episode.reward for episode in episodes}


@pytest.mark.parametrize("family", list(FAMILIES))
async def test_oracle_earns_one_and_doing_nothing_earns_zero(servers: EnvServers, family: str):
    items = instances_of(family)
    assert len(items) == NUM_INSTANCES
    solved = await play_all(servers, [(item, item.oracle) for item in items])
    assert rewards_by_task(solved) == {item.task.task_id: 1.0 for item in items}
    idle = await play_all(servers, [(item, (SAY_DONE,)) for item in items], pause_s=0)
    assert rewards_by_task(idle) == {item.task.task_id: 0.0 for item in items}


@pytest.mark.parametrize("family", [name for name, family in SUITES[SHORTCUTS].items() if family.has_shortcut])
async def test_a_shortcut_works_where_it_is_allowed_and_nowhere_else(servers: EnvServers, family: str):
    suite = build_suite(SHORTCUTS, seed=0, families=[family], num_train=3, num_heldout=1, screen=SCREEN)
    items = (*suite.train, *suite.heldout)
    shown = await play_all(servers, [(item, item.oracle) for item in items])
    assert rewards_by_task(shown) == {item.task.task_id: 1.0 for item in items}
    other = await play_all(servers, [(item, item.other_way) for item in items])
    assert rewards_by_task(other) == {item.task.task_id: float(item.arguments[-1] == Way.SHORTCUT) for item in items}


async def test_giving_up_earns_one_only_where_the_task_cannot_be_done(servers: EnvServers):
    items = [instances_of(family)[0] for family in FAMILIES]
    given_up = await play_all(servers, [(item, (GIVE_UP,)) for item in items], pause_s=0)
    assert {episode.task_id for episode in given_up if episode.reward == 1.0} == {
        "desktop-basics-impossible_request-0000"
    }


async def test_clicking_every_button_solves_nothing(servers: EnvServers):
    item = instances_of("click_button")[0]
    others = [other for other in instances_of("click_button") if other is not item]
    points = [step for other in (item, *others) for step in other.oracle[:1]]
    (episode,) = await play_all(servers, [(item, (*points, SAY_DONE))])
    assert episode.reward == 0.0


@pytest.mark.parametrize("screen", [(1920, 1080)])
async def test_oracles_earn_one_on_a_large_screen(tmp_path: Path, screen: tuple[int, int]):
    suite = build_suite(seed=1, num_train=1, num_heldout=1, screen=screen)
    with embedded_env_server(server_spec(StateDir(tmp_path), screen)) as own:
        played = await play_all(own, [(item, item.oracle) for item in suite.train])
    assert rewards_by_task(played) == {item.task.task_id: 1.0 for item in suite.train}


async def test_recording_keeps_the_screens_that_the_model_will_see(servers: EnvServers):
    tasks = [instances_of(family)[0] for family in ("rename_folder", "click_button", "type_text")]
    async with client_of(servers) as client:
        recording = await record(
            tasks, make_desktop=client.desktop, agent=AGENT, pause_s=PAUSE_S, num_concurrent=NUM_REPLICAS
        )
    assert [item.task_id for item in recording.demonstrations] == [item.task.task_id for item in tasks]
    assert recording.failed == ()
    for item, demonstration in zip(tasks, recording.demonstrations, strict=True):
        assert demonstration.reward == 1.0
        assert len(demonstration.images) == demonstration.num_steps == len(item.oracle)
        assert all(image.startswith(b"\x89PNG") for image in demonstration.images)
        # The desktop answered the action: the screen before it is not the screen after it.
        assert demonstration.images[0] != demonstration.images[1]
