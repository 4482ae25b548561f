"""The catalog: it is always complete, no reader waits for it, and what happened once is one row."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from episode_samples import make_episode, make_step

from osworld_pipeline.atomic_io import write_parquet
from osworld_pipeline.columns import EPISODES, OLDEST_READ, OWNED_TABLES, PART_TABLES, SCHEMA_KEY
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.episode import EpisodePurpose, Outcome, Parity, Reward
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import Injection, TrainedRow
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import BUILT_IN_SUITES
from osworld_pipeline.errors import TableError
from osworld_pipeline.evaluation.scores import read_evals, read_scores, successes_by_task
from osworld_pipeline.evaluation.suites import SUITES
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.builds import new_build
from osworld_pipeline.tables.catalog import fresh_views, one_snapshot, rebuild_catalog
from osworld_pipeline.tables.checkpoints import find_checkpoint, read_checkpoints, upsert_checkpoint
from osworld_pipeline.tables.owned import read_table, table_path, write_table
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.tables.questions.examples import (
    BEST_EPISODE_SCREENSHOTS,
    INJECTED_REPLAY_ROWS,
    SUCCESS_BY_CHECKPOINT,
)
from osworld_pipeline.tables.views import DERIVED
from osworld_pipeline.web.evaluation_names import read_evaluation_names

NUM_VIEWS = "SELECT count(*) FROM duckdb_views() WHERE NOT internal"
VIEWS = ("tasks", "replay", "episodes", "steps", "rollout_groups", "injections", "checkpoints", "evals")


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def checkpoint(name: str, stage: Stage, parent: str | None = None) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=name, stage=stage, parent_id=parent, path=f"checkpoints/{name}", num_updates=6,
        recipe_digest="r", data_digest="d", weights_digest="w", metrics={"loss": 0.5}, run_ids={"mlflow": "m"},
    )  # fmt: skip


def task_row(task_id: str, **changes) -> dict:
    row = {
        "task_id": task_id, "prompt": task_id, "domain": "os", "instruction": "Do it.",
        "task_config": json.dumps({"id": task_id, "related_apps": ["os"]}), "task_config_source": "osworld_repo",
        "has_task_config": True, "platform": "ubuntu",
    }  # fmt: skip
    return row | changes


def replay_row(row_id: str, task_id: str = "t") -> dict:
    return {
        "row_id": row_id, "task_id": task_id, "original_task_id": f"{task_id}_chunk0", "source_dataset": "sft_clean",
        "quality_rank": 1, "reward": 1.0, "is_reward_assumed": False, "num_steps": 1,
        "messages": [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "hi"}]}],
        "images": ["a" * 64], "source_path": "x.jsonl", "source_line": 7,
    }  # fmt: skip


def test_every_view_is_there_before_anything_happened(state: StateDir) -> None:
    rebuild_catalog(state)
    for view in VIEWS:
        assert run_query(state, f"SELECT * FROM {view}").rows == []


def test_a_part_written_after_the_build_shows_at_once(state: StateDir) -> None:
    rebuild_catalog(state)
    TrajectoryStore(state).write_episodes("a", [make_episode("e1")])
    assert run_query(state, "SELECT episode_id FROM episodes").rows == [("e1",)]


def test_an_older_part_without_a_newer_column_reads_as_null(state: StateDir) -> None:
    old = EPISODES.empty_table().drop_columns(["max_turns"])
    rows = [{"episode_id": "old"}]
    name = f"old~{7:016x}-abcdef.parquet"
    schema = old.schema.with_metadata({SCHEMA_KEY: str(OLDEST_READ).encode()})
    write_parquet(state.trajectories / "episodes" / name, old.from_pylist(rows, schema=schema))
    rebuild_catalog(state)
    assert run_query(state, "SELECT episode_id, max_turns FROM episodes").rows == [("old", None)]


NEW_IN_7 = (
    "advantage", "prompt_tokens", "response_tokens", "image_tokens", "num_images", "mean_logprob", "started_utc",
    "ended_utc",
)  # fmt: skip
NEW_IN_8 = ("parity_num_tokens", "parity_mean_diff", "parity_max_diff")


def test_a_state_of_version_6_opens_with_null_for_what_it_lacks_and_counts_updates_from_1(state: StateDir) -> None:
    """Its files have neither tokens, advantages nor timestamps, and no row records an update or an attempt."""
    episode = make_episode(
        "e1", purpose=EpisodePurpose.TRAIN, stage_key="gspo_phase1-0", update=0, group_id="g", started_at=100.5
    )
    TrajectoryStore(state).write_episodes("a", [episode])
    (path,) = (path for path in (state.trajectories / "episodes").iterdir() if path.name.startswith("a~"))
    write_parquet(path, pq.read_table(path).drop_columns([*NEW_IN_7, *NEW_IN_8]))
    upsert_checkpoint(state, checkpoint("gspo_phase1-0", Stage.GSPO_PHASE1, "sft-0"))
    path = table_path(state, "checkpoints")
    write_parquet(path, pq.read_table(path).drop_columns(["saved_utc"]))
    rebuild_catalog(state)
    columns = ", ".join(name for name in NEW_IN_7 if not name.endswith("_utc"))
    assert run_query(state, f"SELECT {columns} FROM episodes").rows == [(None,) * 6]
    times = run_query(state, 'SELECT "update", started_utc, ended_utc FROM episodes').rows
    assert times == [(1, datetime(1970, 1, 1, 0, 1, 40, 500000), datetime(1970, 1, 1, 0, 1, 43, 500000))]
    assert run_query(state, 'SELECT DISTINCT "update" FROM steps').rows == [(1,)]
    assert run_query(state, "SELECT saved_utc FROM checkpoints").rows == [(None,)]
    assert run_query(state, "FROM updates").rows == run_query(state, "FROM stage_attempts").rows == []
    stages = run_query(state, "SELECT stage_key, status, num_updates, num_attempts, started_utc FROM stages").rows
    assert stages == [("gspo_phase1-0", "finished", 6, None, None)]


def test_evals_have_the_results_of_the_parity_probe_and_a_state_of_version_7_opens_without_them(
    state: StateDir,
) -> None:
    probed = Parity(num_tokens=56, mean_diff=2e-7, max_diff=1e-6)
    store, key = TrajectoryStore(state), "eval-sft-000000000001-k"
    store.write_episodes("a", [make_episode("e1", stage_key=key, parity=probed)])
    store.write_episodes("b", [make_episode("e2", stage_key=key, seed=1)])
    store.write_episodes("old", [make_episode("e3", stage_key=key, seed=2, parity=probed)])
    (path,) = (path for path in (state.trajectories / "episodes").iterdir() if path.name.startswith("old~"))
    write_parquet(path, pq.read_table(path).drop_columns(list(NEW_IN_8)))
    rebuild_catalog(state)
    rows = run_query(state, f"SELECT {', '.join(NEW_IN_8)} FROM evals ORDER BY episode_id").rows
    assert rows == [(56, 2e-7, 1e-6), (None, None, None), (None, None, None)]
    assert [store.read_episodes(part)[0].parity for part in ("a", "b", "old")] == [probed, None, None]
    assert [row.parity for row in read_evals(state)] == [probed, None, None]
    (score,) = read_scores(state)
    assert score.parity == probed


def test_an_episode_outside_training_has_no_update(state: StateDir) -> None:
    TrajectoryStore(state).write_episodes("a", [make_episode("e1")])
    rebuild_catalog(state)
    assert run_query(state, 'SELECT "update" FROM episodes').rows == [(-1,)]


def test_timestamps_are_utc_in_every_time_zone_of_the_reader(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        TrajectoryStore(state).write_episodes("a", [make_episode("e1", started_at=86_400.0)])
        upsert_checkpoint(state, replace(checkpoint("sft-0", Stage.SFT), saved_at=86_400.25))
        assert [one.saved_at for one in read_checkpoints(state)] == [86_400.25]
        rebuild_catalog(state)
        rows = run_query(state, "SELECT started_utc, typeof(started_utc), saved_utc FROM evals, checkpoints").rows
        assert rows == [(datetime(1970, 1, 2), "TIMESTAMP", datetime(1970, 1, 2, 0, 0, 0, 250000))]
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


def test_one_line_of_sql_gives_the_licences_of_a_checkpoint(state: StateDir) -> None:
    row = TrainedRow(row_id="d1", kind="demonstration", task_id="t", source_dataset="x", licence="cc-by-4.0")
    upsert_checkpoint(
        state, replace(checkpoint("sft-0", Stage.SFT), sources=(row, replace(row, row_id="d2", licence=None)))
    )
    upsert_checkpoint(state, checkpoint("gspo_phase1-0", Stage.GSPO_PHASE1, "sft-0"))
    rebuild_catalog(state)
    sql = "SELECT DISTINCT licence FROM licences WHERE checkpoint_id = 'gspo_phase1-0' ORDER BY 1"
    assert run_query(state, sql).rows == [("cc-by-4.0",), ("unknown",)]


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({"stage": Stage.EXTERNAL, "licence": "apache-2.0"}, [("apache-2.0", "base-0", "/models/q")]),
        ({"stage": Stage.BASE}, [("unknown", "base-0", "/models/q")]),
        ({"stage": Stage.BASE, "path": "checkpoints/base-0"}, []),
        ({"stage": Stage.EXTERNAL, "path": "https://models.example/v1#m"}, [("unknown", "base-0", "https://models.example/v1#m")]),
    ],
)  # fmt: skip
def test_the_licence_of_weights_from_elsewhere_is_shown_for_checkpoints_that_descend_from_them(
    state: StateDir, base: dict[str, Any], expected: list[tuple]
) -> None:
    upsert_checkpoint(state, replace(checkpoint("base-0", Stage.BASE), **{"path": "/models/q"} | base))
    upsert_checkpoint(state, checkpoint("sft-0", Stage.SFT, "base-0"))
    rebuild_catalog(state)
    sql = "SELECT licence, ancestor_id, path FROM licences WHERE checkpoint_id = 'sft-0' AND how = 'weights'"
    assert run_query(state, sql).rows == expected


def test_a_seed_file_of_an_older_version_is_renewed(state: StateDir) -> None:
    write_parquet(state.trajectories / "episodes" / "_seed.parquet", EPISODES.empty_table().drop_columns(["max_turns"]))
    rebuild_catalog(state)
    assert run_query(state, "SELECT max_turns FROM episodes").rows == []


def test_a_state_folder_with_a_quote_in_its_name_works(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "it's here")
    TrajectoryStore(state).write_episodes("a", [make_episode("e1")])
    rebuild_catalog(state)
    assert run_query(state, "SELECT count(*) FROM steps").rows == [(2,)]


def test_evals_has_one_row_for_a_checkpoint_task_and_seed_the_last_attempt(state: StateDir) -> None:
    first = make_episode("e1-a0", outcome=Outcome.ENV_FAULT, reward=None, error="gone", started_at=1.0)
    second = make_episode("e1-a1", attempt=1, started_at=2.0)
    other_seed = make_episode("e2", seed=1, outcome=Outcome.FAILURE, reward=Reward(task=0.0))
    training = make_episode("e3", seed=2, purpose=EpisodePurpose.TRAIN)
    TrajectoryStore(state).write_episodes("a", [first, second, other_seed, training])
    rebuild_catalog(state)
    rows = run_query(state, "SELECT episode_id, seed, success, reward, max_turns FROM evals ORDER BY seed").rows
    assert rows == [("e1-a1", 0, True, 1.0, 5), ("e2", 1, False, 0.0, 5)]


def test_evals_distinguishes_tasks_of_two_domains_with_the_same_id(state: StateDir) -> None:
    tasks = [{"task_id": "a", "domain": name, "instruction": f"In {name}."} for name in ("chrome", "vlc")]
    write_table(state, "union_tasks", [*tasks, {"task_id": "b", "domain": "os", "instruction": "Alone."}])
    outcomes = (("chrome", Outcome.SUCCESS, 1.0), ("vlc", Outcome.FAILURE, 0.0))
    played = [
        make_episode(domain, task_id="a", domain=domain, stage_key="k", outcome=outcome, reward=Reward(task=reward))
        for domain, outcome, reward in outcomes
    ]
    former = make_episode("former", task_id="b", stage_key="k")
    TrajectoryStore(state).write_episodes("a", [*played, former])
    rows = read_evals(state)
    assert [(row.task_id, row.domain, row.task, row.success) for row in rows] == [
        ("a", "chrome", "chrome/a", True), ("a", "vlc", "vlc/a", False), ("b", "os", "b", True),
    ]  # fmt: skip
    assert list(successes_by_task(rows).values()) == [[True], [True], [False]]
    rebuild_catalog(state)
    assert run_query(state, "SELECT domain, instruction FROM evals ORDER BY domain").rows == [
        ("chrome", "In chrome."), ("os", "Alone."), ("vlc", "In vlc."),
    ]  # fmt: skip


def test_the_suite_of_an_evaluation_is_recorded_and_an_id_with_hyphens_names_none(state: StateDir) -> None:
    hyphens = "bb5e4c0d-f964-439c-97b6-123456789012"
    former = make_episode("former", task_id=hyphens, stage_key="k", seed=1)
    recorded = make_episode("now", task_id=hyphens, domain="chrome", suite="osworld", suite_name="osworld-chrome")
    TrajectoryStore(state).write_episodes("a", [former, recorded])
    rebuild_catalog(state)
    rows = run_query(state, "SELECT episode_id, family, suite, suite_name FROM evals ORDER BY 1").rows
    assert rows == [("former", "unknown", "osworld", None), ("now", "chrome", "osworld", "osworld-chrome")]
    assert {name.suite for name in read_evaluation_names(state).values()} == {"osworld-chrome"}
    assert tuple(name.replace("_", "-") for name in SUITES) == BUILT_IN_SUITES


@pytest.mark.parametrize(("column", "is_read"), [("success", False), ("family", False), ("prompt_tokens", True)])
def test_evals_reads_steps_only_for_columns_that_come_from_steps(state: StateDir, column: str, is_read: bool) -> None:
    rebuild_catalog(state)
    ((_, plan),) = run_query(state, f"EXPLAIN SELECT checkpoint_id, count({column}) FROM evals GROUP BY 1").rows
    assert ("prompt_num_tokens" in plan) == is_read


def test_evals_keeps_a_checkpoints_evaluations_apart(state: StateDir) -> None:
    episodes = [make_episode(key, stage_key=f"eval-sft-000000000001-{key}") for key in ("one", "two")]
    TrajectoryStore(state).write_episodes("a", episodes)
    rebuild_catalog(state)
    found = run_query(state, "SELECT episode_id, seed, evaluation_key FROM evals ORDER BY 1").rows
    assert found == [("one", 0, "one"), ("two", 0, "two")]


def test_evals_have_the_cost_of_an_episode_and_null_for_what_was_not_counted(state: StateDir) -> None:
    silent = tuple(make_step(index, prompt_num_tokens=index, response_num_tokens=index) for index in range(2))
    episodes = [
        make_episode("e1", times_s={"reset": 0.5, "model": 1.0, "step": 2.0, "evaluate": 0.25, "total": 4.0}),
        make_episode("e2", seed=1, steps=silent, times_s={}),
        make_episode("e3", seed=2, steps=(), outcome=Outcome.ENV_FAULT, reward=None, error="gone"),
        make_episode("e4", seed=3, source_dataset="theirs"),
    ]
    TrajectoryStore(state).write_episodes("a", episodes)
    rebuild_catalog(state)
    sql = "SELECT prompt_tokens, response_tokens, wall_s, reset_s, model_s, step_s, evaluate_s FROM evals ORDER BY seed"
    assert run_query(state, sql).rows == [
        (600, 40, 4.0, 0.5, 1.0, 2.0, 0.25),
        (None, None, None, None, None, None, None),
        (0, 0, 3.0, 0.5, None, None, None),
        (None, None, 3.0, 0.5, None, None, None),
    ]


def test_a_fault_never_counts_as_a_zero(state: StateDir) -> None:
    episodes = [
        make_episode("e1"),
        make_episode("e2", seed=1, outcome=Outcome.GRADER_FAULT, reward=None, error="crashed"),
    ]
    TrajectoryStore(state).write_episodes("a", episodes)
    rebuild_catalog(state)
    desktops = "unknown image/grader unknown"
    assert run_query(state, SUCCESS_BY_CHECKPOINT).rows == [("sft-000000000001", None, 1, 1, 1.0, "", desktops)]


def test_evals_name_the_images_and_graders_of_the_graded_episodes_of_an_evaluation(state: StateDir) -> None:
    fault = {"outcome": Outcome.ENV_FAULT, "reward": None, "error": "gone"}
    same, mixed = (
        {"image_digest": "a" * 64, "grader_version": "7"},
        {"image_digest": "a" * 64, "grader_version": "8, beta"},
    )
    episodes = [
        make_episode("e1", task_id="t1", stage_key="one", **same),
        make_episode("e2", task_id="t2", stage_key="one", **fault),
        make_episode("e3", task_id="t1", stage_key="two", **same),
        make_episode("e4", task_id="t2", stage_key="two", **mixed),
        make_episode("e5", task_id="t1", stage_key="none", **fault),
    ]
    TrajectoryStore(state).write_episodes("a", episodes)
    rebuild_catalog(state)
    both = f"{'a' * 12}/grader 7, {'a' * 12}/grader 8; beta"
    reported = {"e1": both[:21], "e2": both[:21], "e3": both, "e4": both, "e5": ""}
    assert dict(run_query(state, "SELECT episode_id, desktops FROM evals").rows) == reported


def test_evals_have_family_and_suite(state: StateDir) -> None:
    write_table(state, "union_tasks", [task_row("e0df059f-28a6-4169-924f-b9623e7184cc")])
    plain = make_episode("e2", task_id="e0df059f-28a6-4169-924f-b9623e7184cc")
    TrajectoryStore(state).write_episodes("a", [make_episode("e1"), plain])
    rebuild_catalog(state)
    assert run_query(state, "SELECT family, suite FROM evals ORDER BY episode_id").rows == [
        ("rename_folder", "desktop-basics"),
        ("os", "osworld"),
    ]


def test_tasks_show_which_of_them_are_trained_on(state: StateDir) -> None:
    write_table(state, "union_tasks", [task_row("a"), task_row("b")])
    write_table(state, "train_tasks", [task_row("b")])
    rebuild_catalog(state)
    rows = run_query(state, "SELECT task_id, is_train, task_config->>'$.related_apps[0]' FROM tasks ORDER BY 1").rows
    assert rows == [("a", False, "os"), ("b", True, "os")]


def test_a_key_that_occurs_twice_is_refused_and_the_old_catalog_stays(state: StateDir) -> None:
    write_table(state, "union_tasks", [task_row("a")])
    rebuild_catalog(state)
    write_table(state, "union_tasks", [task_row("b"), task_row("b")])
    with pytest.raises(TableError, match="cannot build the catalog"):
        rebuild_catalog(state)
    assert run_query(state, "SELECT task_id FROM union_tasks").rows == [("a",)]
    assert [path for path in state.root.iterdir() if path.name.startswith(".")] == []


def test_a_row_of_the_wrong_type_is_refused(state: StateDir) -> None:
    with pytest.raises(TableError, match="a row of union_tasks"):
        write_table(state, "union_tasks", [task_row("a", has_task_config="perhaps")])
    assert read_table(state, "union_tasks").num_rows == 0


def test_a_query_finds_the_screenshots_that_the_best_episode_of_phase_2_saw(state: StateDir) -> None:
    for name, stage in (("p1", Stage.GSPO_PHASE1), ("p2", Stage.GSPO_PHASE2)):
        upsert_checkpoint(state, checkpoint(name, stage))

    def played(name: str, key: str, shaped: float, sha256: str):
        steps = (make_step(0, sha256=sha256 * 64), make_step(1, sha256="f" * 64))
        episode = make_episode(name, steps=steps, reward=Reward(task=1.0, shaped=shaped), stage_key=key)
        return replace(episode, purpose=EpisodePurpose.TRAIN, checkpoint_id="p1", update=0)

    store = TrajectoryStore(state)
    store.write_episodes(
        "a", [played("worse", "p2", 0.8, "1"), played("best", "p2", 0.9, "2"), played("other", "p1", 1.0, "3")]
    )
    rebuild_catalog(state)
    rows = run_query(state, BEST_EPISODE_SCREENSHOTS).rows
    assert [row[:3] for row in rows] == [("best", 0, "2" * 64), ("best", 1, "f" * 64)]


def test_a_query_finds_the_replay_rows_that_were_injected(state: StateDir) -> None:
    write_table(state, "replay_buffer", [replay_row("r1"), replay_row("r2")])
    group = RolloutGroup(group_id="g1", task_id="t", stage_key="p1", update=2, episodes=())
    injection = Injection(
        injection_id="i1", group_id="g1", row_id="r2", task_id="t", source_dataset="sft_clean",
        reward=1.0, advantage=1.5, weight=1.0,
    )  # fmt: skip
    TrajectoryStore(state).write_groups("a", [group], [injection])
    rebuild_catalog(state)
    assert run_query(state, INJECTED_REPLAY_ROWS).rows == [("g1", "r2", "t", "sft_clean", "x.jsonl", 7, 1.0, 1.5, 1.0)]


def test_a_checkpoint_written_twice_is_one_row(state: StateDir) -> None:
    upsert_checkpoint(state, checkpoint("sft-1", Stage.SFT, "base-1"))
    upsert_checkpoint(state, checkpoint("base-1", Stage.BASE))
    newer = replace(checkpoint("sft-1", Stage.SFT, "base-1"), num_updates=9)
    upsert_checkpoint(state, newer)
    assert read_checkpoints(state) == [checkpoint("base-1", Stage.BASE), newer]
    assert find_checkpoint(state, "sft-1") == newer
    assert find_checkpoint(state, "nobody") is None


def test_a_checkpoint_is_not_added_to_a_table_of_a_newer_program(state: StateDir) -> None:
    upsert_checkpoint(state, checkpoint("base-1", Stage.BASE))
    table = read_table(state, "checkpoints")
    write_parquet(table_path(state, "checkpoints"), table.append_column("of_tomorrow", [[1]]))
    with pytest.raises(TableError, match=r"columns that this version does not know \(of_tomorrow\)"):
        upsert_checkpoint(state, checkpoint("sft-1", Stage.SFT))
    assert len(read_checkpoints(state)) == 1


def test_checkpoints_written_by_many_at_once_are_all_kept(state: StateDir) -> None:
    threads = [
        threading.Thread(target=upsert_checkpoint, args=(state, checkpoint(f"sft-{index}", Stage.SFT)))
        for index in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_checkpoints(state)) == 8


@pytest.mark.slow
def test_simultaneous_rebuilds_and_a_reader_all_succeed(state: StateDir) -> None:
    rebuild_catalog(state)
    with duckdb.connect(str(state.catalog), read_only=True) as reader:
        script = "import sys; from pathlib import Path; from osworld_pipeline.domain.state import StateDir; "
        script += (
            "from osworld_pipeline.tables.catalog import rebuild_catalog; rebuild_catalog(StateDir(Path(sys.argv[1])))"
        )
        children = [subprocess.Popen([sys.executable, "-c", script, str(state.root)]) for _ in range(3)]
        assert [child.wait(timeout=60) for child in children] == [0, 0, 0]
        assert reader.execute("SELECT count(*) FROM episodes").fetchone() == (0,)
    assert sorted(path.name for path in state.root.iterdir()) == ["catalog.lock", "osworld.duckdb", "trajectories"]


@pytest.mark.slow
def test_a_killed_rebuild_leaves_the_old_catalog(state: StateDir) -> None:
    write_table(state, "union_tasks", [task_row("a")])
    rebuild_catalog(state)
    script = "import sys; from pathlib import Path; from osworld_pipeline.domain.state import StateDir; "
    script += "from osworld_pipeline.tables.catalog import rebuild_catalog; print('ready', flush=True)\n"
    script += "while True: rebuild_catalog(StateDir(Path(sys.argv[1])))"
    for round_ in range(3):
        command = [sys.executable, "-c", script, str(state.root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(0.1 + 0.031 * round_)
            os.kill(child.pid, signal.SIGKILL)
        assert run_query(state, "SELECT task_id FROM tasks").rows == [("a",)]
    rebuild_catalog(state)
    assert [path.name for path in state.root.iterdir() if path.name.startswith(".")] == []


def test_every_part_table_has_a_view_with_its_columns(state: StateDir) -> None:
    rebuild_catalog(state)
    for name, schema in PART_TABLES.items():
        assert run_query(state, f"SELECT * FROM {name}").columns == schema.names


def num_episodes(state: StateDir) -> int:
    with fresh_views(state, "episodes") as views:
        return views.execute("SELECT count(*) FROM episodes").fetchall()[0][0]


def test_one_snapshot_is_fixed_at_its_start_and_limited_to_its_state(state: StateDir, tmp_path: Path) -> None:
    store, other = TrajectoryStore(state), StateDir(tmp_path / "other")
    store.write_episodes("a", [make_episode("e1")])
    with one_snapshot(state):
        store.write_episodes("b", [make_episode("e2")])
        TrajectoryStore(other).write_episodes("a", [make_episode(name) for name in ("e3", "e4", "e5")])
        assert (num_episodes(state), num_episodes(other)) == (1, 3)
        with pytest.raises(TableError, match="no_such_column"), fresh_views(state) as views:
            views.execute("SELECT no_such_column FROM episodes")
    assert num_episodes(state) == 2


@pytest.mark.parametrize("name", [*PART_TABLES, *DERIVED])
def test_a_named_view_is_opened_with_the_views_that_it_reads_and_is_the_same(state: StateDir, name: str) -> None:
    TrajectoryStore(state).write_episodes("a", [make_episode("e1")])
    with fresh_views(state, name) as few:
        columns = few.execute(f"DESCRIBE {name}").fetchall()
        assert few.execute("SELECT count(*) FROM checkpoints").fetchall() == [(0,)]
        few.execute(f"FROM {name}").fetchall()
        assert few.execute(NUM_VIEWS).fetchall() < [(len([*PART_TABLES, *DERIVED]),)]
    with fresh_views(state) as views:
        assert views.execute(NUM_VIEWS).fetchall() == [(len([*PART_TABLES, *DERIVED]),)]
        assert views.execute(f"DESCRIBE {name}").fetchall() == columns


def test_our_own_views_read_the_tables_of_a_build_in_place(state: StateDir) -> None:
    """A copy of the messages of a large replay buffer would be several times its size."""
    few = pa.schema([OWNED_TABLES["replay_buffer"].field(name) for name in ("row_id", "messages")])
    old = pa.Table.from_pylist([{"row_id": "r", "messages": [{"role": "user", "content": []}]}], schema=few)
    tasks = pa.Table.from_pylist([task_row("a")], schema=OWNED_TABLES["union_tasks"])
    with new_build(state) as folder:
        write_parquet(folder / "replay_buffer.parquet", old)
        write_parquet(folder / "union_tasks.parquet", tasks)
    with fresh_views(state) as views:
        kinds = (
            "SELECT table_name, table_type FROM information_schema.tables WHERE table_name IN ('{}', '{}') ORDER BY 1"
        )
        found = views.execute(kinds.format("replay_buffer", "checkpoints")).fetchall()
        assert found == [("checkpoints", "BASE TABLE"), ("replay_buffer", "VIEW")]
        rows = views.execute("SELECT row_id, messages[1].role, reward, images FROM replay_buffer").fetchall()
        assert rows == [("r", "user", None, None)]
        assert views.execute("SELECT task_id, is_train, typeof(task_config) FROM tasks").fetchall()[0][0] == "a"
        kind = views.execute("DESCRIBE SELECT messages FROM replay_buffer").fetchall()[0][1]
    rebuild_catalog(state)
    assert run_query(state, "SELECT row_id, messages[1].role, reward, images FROM replay_buffer").rows == rows
    assert run_query(state, "SELECT column_type FROM (DESCRIBE SELECT messages FROM replay_buffer)").rows == [(kind,)]
