"""A GSPO phase on real desktops with faults at random times: the env server, desktops, the policy server or the trainer
itself is killed, or a disk fills up. The phase ends with the checkpoint and the groups of an undisturbed run, nothing
is recorded twice, and no fault is counted as a reward.

`make test-faults` runs it. OSWORLD_CHAOS_KILLS sets the number of faults (the phase grows with it), OSWORLD_CHAOS_SEED
their kinds and times; with pytest's -s it prints what happened.
"""

import io
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from chaos import Chaos, Fault, Program, Server, env_server, plan_faults, policy_server, small_disk
from env_server_process import desktops_below, processes_below
from launches import wait_for_no_process
from PIL import Image

from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.base import make_base
from osworld_pipeline.runs.checkpoints.ids import read_checkpoint, recipe_suite
from osworld_pipeline.runs.job import StageJob
from osworld_pipeline.store import BlobStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.owned import write_table
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.training.weights.manifest import verify_checkpoint
from osworld_pipeline.training.weights.weights_digest import weights_digest

NUM_KILLS = int(os.environ.get("OSWORLD_CHAOS_KILLS", "12"))
NUM_UPDATES = max(3, NUM_KILLS // 2)
TASKS_PER_UPDATE = 2
LIMIT_S = 120 + 30 * NUM_KILLS
STAGE = "gspo_phase1-chaos"
SERVICES = (Fault.ENV_SERVER, Fault.DESKTOP, Fault.POLICY_SERVER)
ALL = (*SERVICES, Fault.TRAINER, Fault.DISK)

pytestmark = [
    pytest.mark.desktop,
    pytest.mark.slow,
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.skipif("OSWORLD_CHAOS_KILLS" not in os.environ, reason="takes minutes: make test-faults"),
]


def chaos_recipe(mode: str, *more: str) -> Recipe:
    return load_recipe(
        "smoke",
        settings=[
            f"rollout.mode={mode}",
            f"gspo.tasks_per_update={TASKS_PER_UPDATE}",
            f"gspo.phase1.num_updates={NUM_UPDATES}",
            "gspo.learning_rate=1e-3",
            "trainer.num_threads=1",
            "rollout.held_pause_s=1",
            "rollout.max_held_updates=99",
            *more,
        ],
    )


def drawn_settings(rng: random.Random) -> list[str]:
    """With a small retry budget a fault is an episode's outcome; with a larger one the episode is tried again."""
    return [
        f"trainer.save_every={rng.choice((1, 2))}",
        f"gspo.max_env_attempts={rng.choice((1, 1, 3))}",
        f"engine.retry_budget_s={rng.choice((2, 25))}",
        "engine.request_timeout_s=15",
        "engine.health_timeout_s=60",
    ]


@dataclass(frozen=True, kw_only=True)
class Road:
    """The state folder and the servers from before the phase; every run gets a copy of the state."""

    root: Path
    env: Server
    policy: Server
    folder: Path


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    folder = tmp_path_factory.mktemp("chaos")
    recipe, root = chaos_recipe("synchronous"), folder / "road"
    job = StageJob(recipe=recipe, state_root=root, stage=Stage.BASE, checkpoint_id="base-1", data_digest="d")
    make_base.main(job, lambda message: None)
    write_tasks(StateDir(root), recipe)
    screen = (recipe.desktop.screen_width, recipe.desktop.screen_height)
    with (
        policy_server(folder, checkpoint=root / "checkpoints" / "base-1") as policy,
        env_server(folder, images=folder / "images", num_replicas=recipe.desktop.num_replicas, screen=screen) as env,
    ):
        env.wait_ready()
        policy.wait_ready()
        yield Road(root=root, env=env, policy=policy, folder=folder)
        env.stop()
        policy.stop()
        left = wait_for_no_process(folder, limit_s=25)
        assert not left, f"left running: {left}"
        assert list((folder / "tmp").iterdir()) == [], "an env server left temporary files"


def write_tasks(state: StateDir, recipe: Recipe) -> None:
    """The suite's training tasks, each with a demonstration that may join a failed group."""
    blobs, dialect = BlobStore(state.blobs), load_dialect(recipe.agent.dialect)
    tasks, rows = [], []
    for number, item in enumerate(recipe_suite(recipe).train):
        task = item.task
        tasks.append({"task_id": task.task_id, "domain": task.domain, "task_config": json.dumps(dict(task.config))})
        picture = io.BytesIO()
        size = (recipe.desktop.screen_width, recipe.desktop.screen_height)
        Image.new("RGB", size, (40 * number, 90, 200)).save(picture, format="PNG")
        step = item.oracle[0]
        turns = [
            system_message("You operate a computer."),
            user_message(f"[Task]\n{task.instruction}"),
            assistant_message(dialect.format(step.description, step.arguments)),
        ]
        parts = [
            {
                "role": turn["role"],
                "content": [{"type": part["type"], "text": part.get("text")} for part in turn["content"]],
            }
            for turn in turns
        ]
        rows.append(
            {
                "row_id": f"row{number}",
                "task_id": task.task_id,
                "original_task_id": task.task_id,
                "source_dataset": "sft_clean",
                "reward": 1.0,
                "num_steps": 1,
                "messages": parts,
                "images": [blobs.write(picture.getvalue(), suffix="png")],
                "dialect": dialect.name,
            }
        )
    write_table(state, "train_tasks", tasks)
    write_table(state, "replay_buffer", rows)


def phase_of(road: Road, recipe: Recipe, place: Path) -> tuple[StateDir, Program]:
    """A state folder at the start of the phase, and the trainer that runs the phase."""
    logs = road.folder / f"{place.parent.name}-{place.name}"
    logs.mkdir()
    state = StateDir(place / "state")
    shutil.copytree(road.root, state.root)
    job = {
        "recipe": recipe.model_dump(mode="json"),
        "stage": "gspo_phase1",
        "state_root": str(state.root),
        "checkpoint_id": STAGE,
        "parent": {"checkpoint_id": "base-1", "path": "checkpoints/base-1"},
        "data_digest": "d",
        "servers": {"urls": [road.env.url], "token": None, "num_replicas": recipe.desktop.num_replicas},
        "parent_pid": os.getpid(),
    }
    (logs / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "osworld_pipeline.runs", "train_gspo", "--print"]
    return state, Program(command=command, log=logs / "trainer.log", job=logs / "job.json")


def run_phase(
    road: Road, trainer: Program, plan: Sequence[Fault], rng: random.Random, *, disk: Path | None = None
) -> Chaos:
    chaos = Chaos(
        trainer=trainer,
        servers={Fault.ENV_SERVER: road.env, Fault.POLICY_SERVER: road.policy},
        victims=lambda: victims_of(road.env),
        num_live=lambda: num_live(road.env),
        num_replicas=chaos_recipe("synchronous").desktop.num_replicas,
        disk=disk,
        checkpoint_bytes=3 * sum(path.stat().st_size for path in (road.root / "checkpoints" / "base-1").iterdir()),
        plan=list(plan),
        rng=rng,
    )
    try:
        chaos.run(limit_s=LIMIT_S)
    finally:
        if trainer.is_running:
            trainer.kill()
    print(chaos.reported())
    return chaos


def victims_of(server: Server) -> list[int]:
    """Desktops and the processes inside them; often nothing depends on such a process."""
    if not server.is_running:
        return []
    try:
        inner = [*processes_below(server.pid)]
        return [*desktops_below(server.pid) * len(inner), *inner]
    except OSError:
        return []


def num_live(server: Server) -> int:
    try:
        return len(httpx.get(f"{server.url}/v1/episodes", timeout=2.0, trust_env=False).json()["episodes"])
    except httpx.HTTPError:
        return 0


@pytest.fixture(scope="module")
def undisturbed(road: Road, tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    """A synchronous phase without faults."""
    state, trainer = phase_of(road, chaos_recipe("synchronous"), tmp_path_factory.mktemp("undisturbed") / "run")
    chaos = run_phase(road, trainer, [], random.Random(0))
    assert trainer.num_starts == 1, chaos.reported()
    check_state(state, chaos.reported())
    return state


def seeded(name: str) -> tuple[int, random.Random]:
    seed = int(os.environ.get("OSWORLD_CHAOS_SEED", random.randrange(10**6)))
    print(f"seed {seed}, {NUM_KILLS} faults")
    return seed, random.Random(f"{seed}-{name}")


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        pytest.param("synchronous", (Fault.TRAINER,), id="synchronous-trainer"),
        pytest.param("asynchronous", SERVICES, id="asynchronous-services"),
        pytest.param("asynchronous", ALL, id="asynchronous-everything"),
        pytest.param("synchronous", ALL, id="lockstep-everything"),
    ],
)
def test_a_phase_disturbed_at_random_ends_as_an_undisturbed_one(
    road: Road, undisturbed: StateDir, tmp_path: Path, mode: str, kinds: tuple[Fault, ...]
) -> None:
    seed, rng = seeded(f"{mode}-{len(kinds)}")
    is_trainer_alone = kinds == (Fault.TRAINER,)
    settings = drawn_settings(rng)
    if not is_trainer_alone:
        settings += ["engine.kind=sglang", f'engine.urls=["{road.policy.url}"]']
        settings += [f"engine.weights={rng.choice(('folder', 'broadcast'))}"]
    with nullcontext(False) if is_trainer_alone else small_disk(tmp_path / "disk") as has_disk:
        if not has_disk:
            kinds = tuple(kind for kind in kinds if kind is not Fault.DISK)
        state, trainer = phase_of(road, chaos_recipe(mode, *settings), tmp_path / "disk")
        num_faults = max(1, NUM_KILLS // 2) if is_trainer_alone else NUM_KILLS
        plan = plan_faults(kinds, num_faults, rng)
        chaos = run_phase(road, trainer, plan, rng, disk=tmp_path / "disk" if has_disk else None)
        reported = f"seed {seed}: {chaos.reported()}"
        assert chaos.done, reported
        check_state(state, reported)
        assert groups_by_update(state) == groups_by_update(undisturbed), reported
        if kinds == SERVICES:  # a killed trainer loses the rollouts of its update
            assert num_faulted(state) > 0, f"no fault was recorded; {reported}"
        if is_trainer_alone:
            assert trainer.num_starts == chaos.done[Fault.TRAINER] + 1, reported
            first = first_differences(state, undisturbed)
            assert final_digest(state) == final_digest(undisturbed), f"{first}; {reported}"
    if not is_trainer_alone and not has_disk:
        pytest.skip("all of it held, but for the full disk: mounting a small one is not allowed here")


def final_digest(state: StateDir) -> str:
    checkpoint = read_checkpoint(state, STAGE)
    assert checkpoint is not None
    return checkpoint.weights_digest


def first_differences(state: StateDir, other: StateDir) -> list[tuple[object, ...]]:
    """The first steps whose screenshots, responses or outcomes differ, and how their episodes ended."""
    sql = """
        SELECT e."update", e.episode_id, s.step_index, s.screenshot_sha256, s.response_text, e.outcome, e.error
        FROM episodes e LEFT JOIN steps s USING (episode_id) ORDER BY ALL"""
    mine, theirs = run_query(state, sql).rows, run_query(other, sql).rows
    return [pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]][:2]


def groups_by_update(state: StateDir) -> list[tuple[int, int]]:
    """Groups that took a place in an update; a stale group was replaced by another."""
    sql = (
        "SELECT \"update\", count(*) FROM rollout_groups WHERE fate NOT IN ('stale', 'held', 'superseded') "
        "GROUP BY ALL ORDER BY ALL"
    )
    return run_query(state, sql).rows


def num_faulted(state: StateDir) -> int:
    """Episodes that ended in a fault, or had to be tried again."""
    return run_query(state, "SELECT count(*) FROM episodes WHERE NOT is_valid OR attempt > 0").rows[0][0]


NOTHING = {
    "an episode twice": "SELECT episode_id FROM episodes GROUP BY ALL HAVING count(*) > 1",
    "a group twice": "SELECT group_id FROM rollout_groups GROUP BY ALL HAVING count(*) > 1",
    "a step twice": "SELECT episode_id, step_index FROM steps GROUP BY ALL HAVING count(*) > 1",
    "a step of nobody": "SELECT episode_id FROM steps ANTI JOIN episodes USING (episode_id)",
    "an episode without its steps": """
        SELECT e.episode_id FROM episodes e LEFT JOIN steps s USING (episode_id)
        GROUP BY e.episode_id, e.num_steps HAVING count(s.step_index) <> e.num_steps""",
    "a fault with a reward": """
        SELECT episode_id, outcome, task_reward FROM episodes
        WHERE NOT is_valid AND (task_reward IS NOT NULL OR shaped_reward IS NOT NULL)""",
    "a valid episode without a reward": "SELECT episode_id FROM episodes WHERE is_valid AND task_reward IS NULL",
    "a fault without a sentence": "SELECT episode_id FROM episodes WHERE NOT is_valid AND coalesce(error, '') = ''",
    "a fault with a reward in its group": """
        SELECT group_id FROM (SELECT group_id, unnest(outcomes) AS outcome, unnest(task_rewards) AS reward
                              FROM rollout_groups)
        WHERE (outcome IN ('success', 'failure', 'truncated')) <> (reward IS NOT NULL)""",
    "a group that is not its episodes": """
        SELECT group_id FROM rollout_groups g FULL JOIN (
            SELECT group_id, list_sort(list(episode_id)) AS ids, min("update") AS low, max("update") AS high
            FROM episodes GROUP BY group_id) e USING (group_id)
        WHERE list_sort(g.episode_ids) IS DISTINCT FROM e.ids OR g."update" IS DISTINCT FROM e.low
            OR g."update" IS DISTINCT FROM e.high""",
    "an injection that its group does not know": """
        SELECT i.injection_id FROM injections i LEFT JOIN rollout_groups g USING (group_id)
        WHERE g.replay_row_id IS DISTINCT FROM i.row_id OR g."update" IS DISTINCT FROM i."update"
            OR g.task_id IS DISTINCT FROM i.task_id OR g.num_successes > 0 OR g.num_valid = 0""",
    "a group whose injection is missing or there twice": """
        SELECT g.group_id FROM rollout_groups g LEFT JOIN injections i USING (group_id)
        WHERE g.replay_row_id IS NOT NULL AND g.fate = 'trained' GROUP BY ALL HAVING count(i.injection_id) <> 1""",
    "an update twice": 'SELECT stage_key, "update" FROM updates GROUP BY ALL HAVING count(*) > 1',
    "an injected row that is nowhere": "SELECT i.row_id FROM injections i ANTI JOIN replay r USING (row_id)",
}


def check_state(state: StateDir, reported: str) -> None:
    checkpoint = read_checkpoint(state, STAGE)
    assert checkpoint is not None, reported
    folder = state.root / checkpoint.path
    assert checkpoint.num_updates == NUM_UPDATES, reported
    assert checkpoint.weights_digest == weights_digest(folder), reported
    assert checkpoint.weights_digest != weights_digest(state.checkpoints / "base-1"), f"nothing was learned; {reported}"
    verify_checkpoint(folder, is_required=True)
    rebuild_catalog(state)
    for what, sql in NOTHING.items():
        assert run_query(state, sql).rows == [], f"{what}; {reported}"
    assert groups_by_update(state) == [(update, TASKS_PER_UPDATE) for update in range(1, NUM_UPDATES + 1)], reported
    updates = run_query(state, f"SELECT \"update\" FROM updates WHERE stage_key = '{STAGE}' ORDER BY 1").rows
    assert updates == [(update,) for update in range(1, NUM_UPDATES + 1)], reported
    assert run_query(state, "SELECT count(*) > 0 FROM injections").rows == [(True,)], reported
    outcomes = run_query(state, "SELECT outcome, attempt, count(*) FROM episodes GROUP BY ALL ORDER BY ALL").rows
    print("outcome, attempt, episodes:", outcomes)
    print("fate, groups:", run_query(state, "SELECT fate, count(*) FROM rollout_groups GROUP BY ALL ORDER BY ALL").rows)
    seen = {row[0] for row in run_query(state, "SELECT DISTINCT screenshot_sha256 FROM steps").rows}
    assert seen <= {path.stem for path in state.blobs.glob("*/*")}, reported
    left = [path for path in state.root.rglob("*") if is_temporary(path)]
    assert left == [], reported
    assert {path.name for path in state.checkpoints.iterdir() if path.is_dir()} == {"base-1", STAGE}, reported


def is_temporary(path: Path) -> bool:
    return ".tmp" in path.name or path.name.startswith((".writing-", ".vision-check-", ".ballast", "weights-"))
