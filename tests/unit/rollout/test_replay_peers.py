"""The buffers of Slime-OSWorld and OSGym against ours on the same rows: the same pools, the same decisions, the same
returns. Their checkouts are not in this repository: OSWORLD_PEERS names a folder that holds slime/ and osgym/."""

import ast
import importlib.util
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replay_samples import group_of, make_row, rollout, write_rows

from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import ReplayRow, base_task_id
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import ReplaySection
from osworld_pipeline.rollout.replay import ReplayBuffer
from osworld_pipeline.rollout.step_replay import ReplayStep, StepReplayBuffer
from osworld_pipeline.tables.replay.candidates import ReplayCandidates

pytestmark = pytest.mark.skipif("OSWORLD_PEERS" not in os.environ, reason="OSWORLD_PEERS names no folder")
TASKS = ["t", "u", "t_chunk0", "t_chunk1", "u_chunk0", "v_chunk0", "v_chunk1", "v", "w"]


@pytest.fixture
def slime() -> Iterator[Any]:
    path = Path(os.environ["OSWORLD_PEERS"]) / "slime" / "slime_osworld" / "replay_buffer.py"
    spec = importlib.util.spec_from_file_location("slime_replay_buffer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def osgym_buffer() -> Any:
    """Only OSGym's class, because its module imports packages that are not installed here."""
    path = Path(os.environ["OSWORLD_PEERS"]) / "osgym" / "examples" / "data_server.py"
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ReplayBuffer"]
    names: dict[str, Any] = {"random": random}
    exec(compile(tree, str(path), "exec"), names)
    return names["ReplayBuffer"]


def plain(group: RolloutGroup, row: ReplayRow) -> list[Trajectory]:
    return [Trajectory(trajectory_id=row.row_id, task_id=row.task_id, token_ids=(1,), response_mask=(1,), images=())]


@pytest.mark.parametrize("seed", range(4))
def test_pools_and_decisions_are_those_of_slime(slime: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        make_row(f"r{index}", rng.choice(TASKS[:-1]), reward=rng.choice([0.0, 0.4, 0.5, 1.0]), source_line=index)
        for index in range(30)
    ]
    path = tmp_path / "replay.jsonl"
    lines = [{"id": row["original_task_id"], "messages": row["row_id"], "reward": row["reward"]} for row in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    theirs = slime.ExperienceReplayBuffer(path, max_samples_per_task=3)
    state = write_rows(StateDir(tmp_path), *rows)
    section = ReplaySection(per_task=3)
    candidates = ReplayCandidates(state, section)
    found = candidates.find(TASKS)
    candidates.close()
    groups = []
    for task_id in TASKS:
        pools = [task_id] if theirs.pool.get(task_id) else theirs.base_to_chunks.get(base_task_id(task_id), [])
        expected = {sample.conversations for pool in pools for sample in theirs.pool[pool]}
        assert {row.row_id for row in found.get(task_id, [])} == expected
        rewards = [rng.choice([0.0, 0.0, 0.49, 0.5]) for _ in range(3)]
        episodes = [rollout(f"{task_id}-{index}", reward, task_id=task_id) for index, reward in enumerate(rewards)]
        groups.append(group_of(*episodes, group_id=task_id, task_id=task_id))
    with ReplayBuffer(state, section) as buffer:
        served = buffer.serve(groups, update=0, render=plain)
    for group in groups:
        rewards = [episode.reward.task for episode in group.episodes if episode.reward is not None]
        assert (group.group_id in served.groups) == (theirs.maybe_inject(group.task_id, rewards) is not None)
    assert served.stats.rate == theirs.get_stats()["injection_rate"]


@pytest.mark.parametrize("only_keep_outcome", [False, True])
def test_returns_and_balance_are_those_of_osgym(osgym_buffer: Any, only_keep_outcome: bool) -> None:
    rng = random.Random(5)
    theirs = osgym_buffer(capacity=20, gamma=0.9, only_keep_outcome=only_keep_outcome, balance_thres=0.1)
    ours = StepReplayBuffer(20, reward_discount=0.9, only_keep_outcome=only_keep_outcome, balance_threshold=0.1)
    for number in range(15):
        length = rng.randint(1, 6)
        for index in range(length):
            reward, is_last = rng.choice([0.0, 0.0, 0.05, 1.0]), index + 1 == length
            theirs.add((0, {"reward": reward, "done": is_last}, {"uid": f"e{number}", "index": index}))
            step = ReplayStep(
                episode_id=f"e{number}",
                task_id="t",
                step_index=index,
                screenshot_sha256="",
                observation_text="",
                response_text="",
                action=None,
            )
            ours.add_step(step, reward=reward, is_last=is_last)
        assert (ours.stats.num_below, ours.stats.num_above) == theirs.get_balance_stats()
        expected = {
            (meta["uid"], meta["index"], result["reward"]) for _, result, meta in filter(None, theirs.ready_buffer)
        }
        sampled = ours.sample(20)
        assert {(one.step.episode_id, one.step.step_index, one.discounted_return) for one in sampled} == expected
