"""Demonstrations played back on real desktops: a recording that does not earn the reward it claims is found."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from osworld_pipeline.columns import OWNED_TABLES
from osworld_pipeline.datasets.demonstrations import Demonstration
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.digest import canonical_json, digest_json
from osworld_pipeline.domain.replay import ReplayVerification
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.suites import SuiteTask
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.runs.checkpoints.ids import recipe_suite
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers, ServerSpec, embedded_env_server
from osworld_pipeline.runs.rollouts.env_servers import env_config
from osworld_pipeline.runs.sources.record_demonstrations import record
from osworld_pipeline.runs.verify_replay.job import VerificationJob
from osworld_pipeline.runs.verify_replay.journal import FOLDER
from osworld_pipeline.runs.verify_replay.record import read_record
from osworld_pipeline.runs.verify_replay.summary import read_summary
from osworld_pipeline.store.blobs import BlobStore
from osworld_pipeline.tables.owned import write_table

pytestmark = [pytest.mark.desktop, pytest.mark.slow, pytest.mark.timeout(150)]

LIMIT_S = 60.0
DIALECT = load_dialect("slime")


def verifying_recipe() -> Recipe:
    changes = {"desktop": {"pause_s": 0.2}, "replay": {"verify": "all"}}
    data = load_recipe("smoke").model_dump(mode="json")
    return Recipe.model_validate(data | {name: data[name] | values for name, values in changes.items()})


RECIPE = verifying_recipe()
ITEMS = recipe_suite(RECIPE).train


def replay_row(item: Demonstration, blobs: BlobStore, line: int, *, task_id: str | None = None) -> dict[str, Any]:
    return {
        "row_id": digest_json({"messages": list(item.messages), "line": line})[:24],
        "task_id": item.task_id,
        "original_task_id": task_id or item.task_id,
        "source_dataset": "by_hand",
        "reward": 1.0,
        "messages": list(item.messages),
        "images": [blobs.write(image, suffix="png") for image in item.images],
        "dialect": "slime",
        "source_path": "by_hand.jsonl",
        "source_line": line,
    }


def with_turn(item: Demonstration, turn_no: int, arguments: dict[str, Any]) -> Demonstration:
    messages = list(item.messages)
    text = DIALECT.format("Something else", arguments)
    messages[2 + 2 * turn_no] = {"role": "assistant", "content": [{"type": "text", "text": text}]}
    return Demonstration(task_id=item.task_id, messages=tuple(messages), images=item.images, reward=item.reward)


def part_of(item: Demonstration, first_turn: int, last_turn: int) -> Demonstration:
    messages = (item.messages[0], *item.messages[1 + 2 * first_turn : 1 + 2 * last_turn])
    images = item.images[first_turn:last_turn]
    return Demonstration(task_id=item.task_id, messages=messages, images=images, reward=item.reward)


def write_tables(state: StateDir, rows: list[dict[str, Any]], items: list[SuiteTask]) -> None:
    write_table(state, "replay_buffer", pa.Table.from_pylist(rows, schema=OWNED_TABLES["replay_buffer"]))
    tasks = [
        {"task_id": item.task.task_id, "task_config": canonical_json(item.task.config), "domain": item.task.domain}
        for item in items
    ]
    write_table(state, "train_tasks", pa.Table.from_pylist(tasks, schema=OWNED_TABLES["train_tasks"]))


async def recorded(servers: EnvServers, items: list[SuiteTask]) -> dict[str, Demonstration]:
    async with EnvClient(servers.urls, token=servers.token, env_config=env_config(RECIPE)) as client:
        recording = await record(
            items, make_desktop=client.desktop, agent=RECIPE.agent, pause_s=0.2, num_concurrent=servers.num_replicas
        )
    return {item.task_id: item for item in recording.demonstrations}


def start_program(state: StateDir, servers: EnvServers) -> "subprocess.Popen[str]":
    path = state.root / "job.json"
    path.write_text(VerificationJob(recipe=RECIPE, state_root=state.root, servers=servers).model_dump_json())
    command = [sys.executable, "-m", "osworld_pipeline.runs", "verify_replay", "--print"]
    with path.open() as stdin:
        return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True)


def tries(state: StateDir) -> list[ReplayVerification]:
    record = read_record(state)
    parts = (state.trajectories / "replay_verifications").glob("verify-*.parquet")
    assert sum(pq.read_metadata(part).num_rows for part in parts) == record.num_tries
    return list(record)


def journalled(state: StateDir) -> list[dict[str, Any]]:
    """The results that a killed run had finished."""
    paths = (state.trajectories / FOLDER).glob("*.jsonl")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


async def test_playback_records_the_earned_reward_and_a_restart_after_a_kill_repeats_nothing(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    rename, click = ITEMS[0], next(item for item in ITEMS if item.family != ITEMS[0].family)
    items, blobs = [rename, click], BlobStore(state.blobs)
    spec = ServerSpec(state=state, num_replicas=2, screen_width=512, screen_height=320)
    with embedded_env_server(spec) as servers:
        played = await recorded(servers, items)
        good, clicked = played[rename.task.task_id], played[click.task.task_id]
        corrupt = with_turn(good, 0, {"action": "wait"})
        assert good.num_steps == 2
        rows = {
            "good": replay_row(good, blobs, 1),
            "clicked": replay_row(clicked, blobs, 2),
            "corrupt": replay_row(corrupt, blobs, 3),
            "chunk0": replay_row(part_of(good, 0, 1), blobs, 4, task_id=f"{good.task_id}_chunk0"),
            "chunk1": replay_row(part_of(good, 1, 2), blobs, 5, task_id=f"{good.task_id}_chunk1"),
            "lonely": replay_row(part_of(clicked, 0, 1), blobs, 6, task_id=f"{clicked.task_id}_chunk0"),
        }
        write_tables(state, list(rows.values()), items)

        program = start_program(state, servers)
        assert program.stdout is not None
        for line in program.stdout:
            if json.loads(line)["done"] >= 1:
                break
        program.kill()
        program.wait(LIMIT_S)
        program.stdout.close()
    finished = journalled(state)
    assert finished
    assert tries(state) == []
    assert read_summary(state) is None

    after: list[ReplayVerification] = []
    with embedded_env_server(spec) as servers:
        for _ in range(2):
            program = start_program(state, servers)
            output, _ = program.communicate(timeout=LIMIT_S)
            assert program.returncode == 0, output
            after = tries(state)
            ids = [one.verification_id for one in after]
            assert len(ids) == len(set(ids))
            assert {one["verification_id"] for one in finished} <= set(ids)
            assert journalled(state) == []
            assert len(after) == len(rows), "five rows' playbacks, the corrupt one's twice"

    earned = {name: [one.reward for one in after if one.row_id == row["row_id"]] for name, row in rows.items()}
    assert earned == {
        "good": [1.0],
        "clicked": [1.0],
        "corrupt": [0.0, 0.0],
        "chunk0": [1.0],
        "chunk1": [1.0],
        "lonely": [],
    }
    summary = read_summary(state)
    assert summary is not None
    assert (summary.num_verified, summary.num_failed, summary.num_open, summary.num_unplayable) == (3, 1, 0, 1)
    assert [one.row_id for one in summary.failed] == [rows["corrupt"]["row_id"]]
    assert summary.failed[0].earned == (0.0, 0.0)
    assert summary.verified_coverage == 1.0
