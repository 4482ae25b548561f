"""The lineage views and the walk through them in both directions, on a family of checkpoints made by hand.

base-1 -> sft-1 (fine-tuned on d1) -> gspo-1 (two updates: group g0 with d2 injected, g1; g2 dropped), with a milestone
gspo-1-u0001 after the first.
"""

from pathlib import Path
from typing import Any

import pytest
from episode_samples import make_episode, make_step

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.replay import Injection, ReplayVerification, TrainedRow
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.runs.verify_replay.record import read_record
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.checkpoints import read_checkpoint_row, upsert_checkpoint
from osworld_pipeline.tables.owned import write_table
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.tables.questions.examples import INJECTED_REPLAY_ROWS
from osworld_pipeline.tables.replay.rows import verified_rewards
from osworld_pipeline.tables.walk import Link, walk

D1, D2 = "d1" * 12, "d2" * 12
SEEN, TRAINED = "5" * 64, "7" * 64


def checkpoint(name: str, stage: Stage, parent_id: str | None, *, num_updates: int = 2, **changes: Any) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=name, stage=stage, parent_id=parent_id, path=f"checkpoints/{name}", num_updates=num_updates,
        recipe_digest="r", data_digest="d", weights_digest="w", recipe={"name": "by-hand"}, code_version="c0ffee",
        is_code_dirty=False, run_ids={"dagster": f"dagster-{name}", "mlflow": f"mlflow-{name}"}, **changes,
    )  # fmt: skip


def evaluation(checkpoint_id: str) -> Episode:
    steps = (make_step(0, sha256=SEEN), make_step(1, sha256=SEEN, screenshot_format="jpeg"))
    return make_episode(
        f"eval-{checkpoint_id}", task_id="t", checkpoint_id=checkpoint_id, stage_key=f"eval-{checkpoint_id}-key",
        steps=steps, run_ids={"dagster": "dagster-eval", "mlflow": "mlflow-eval"},
    )  # fmt: skip


def group(name: str, update: int, *, status: GroupStatus = GroupStatus.TRAINED) -> RolloutGroup:
    def sibling(sample: int, outcome: Outcome) -> Episode:
        return make_episode(
            f"{name}-s{sample}", task_id="t", purpose=EpisodePurpose.TRAIN, stage_key="gspo-1", update=update,
            group_id=name, checkpoint_id="sft-1", outcome=outcome, steps=(make_step(0, sha256=TRAINED),),
            reward=make_episode().reward if outcome.is_valid else None, error=None if outcome.is_valid else "gone",
        )  # fmt: skip

    episodes = (sibling(0, Outcome.SUCCESS), sibling(1, Outcome.FAILURE), sibling(2, Outcome.ENV_FAULT))
    return RolloutGroup(group_id=name, task_id="t", stage_key="gspo-1", update=update, episodes=episodes, status=status)


def demonstration(row_id: str, line: int) -> dict[str, Any]:
    return {
        "row_id": row_id, "task_id": "t", "original_task_id": "t", "source_dataset": "sft_clean", "quality_rank": 1,
        "reward": 1.0, "is_reward_assumed": False, "num_steps": 1, "messages": [], "images": [SEEN],
        "dialect": "slime", "action_types": ["type"], "licence": "mit", "source_path": "raw.jsonl",
        "source_line": line,
    }  # fmt: skip


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    state = StateDir(tmp_path_factory.mktemp("state"))
    upsert_checkpoint(state, checkpoint("base-1", Stage.BASE, None, num_updates=0))
    upsert_checkpoint(state, checkpoint("sft-1", Stage.SFT, "base-1", row_ids=(D1,)))
    upsert_checkpoint(state, checkpoint("gspo-1-u0001", Stage.GSPO_PHASE1, "sft-1", num_updates=1))
    upsert_checkpoint(state, checkpoint("gspo-1", Stage.GSPO_PHASE1, "sft-1"))
    upsert_checkpoint(state, checkpoint("other-1", Stage.BASE, None, num_updates=0))
    write_table(state, "replay_buffer", [demonstration(D1, 1), demonstration(D2, 2)])
    task = {"task_id": "t", "domain": "os", "instruction": "Do it.", "task_config": "{}"}
    write_table(state, "union_tasks", [task])
    store = TrajectoryStore(state)
    groups = [group("g0", 0), group("g1", 1), group("g2", 1, status=GroupStatus.ZERO_VARIANCE)]
    joined = Injection(
        injection_id="i0", group_id="g1", row_id=D2, task_id="t", source_dataset="sft_clean", reward=1.0,
        advantage=1.0, weight=1.0, kind="demonstration",
    )  # fmt: skip
    store.write_episodes("training", [episode for one in groups for episode in one.episodes])
    store.write_groups("training", groups, [joined])
    scored = ("base-1", "sft-1", "gspo-1-u0001", "gspo-1", "other-1")
    store.write_episodes("evaluation", [evaluation(name) for name in scored])
    rebuild_catalog(state)
    return state


def rows(state: StateDir, sql: str) -> list[tuple[Any, ...]]:
    return run_query(state, sql).rows


def test_an_evaluation_resolves_to_its_pixels_its_parents_and_all_that_made_them_in_one_query(state: StateDir) -> None:
    found = rows(
        state,
        "SELECT kind, source_id, how, generations, path, line FROM lineage WHERE episode_id = 'eval-gspo-1' "
        'ORDER BY generations NULLS FIRST, kind, source_id, "index"',
    )
    assert found == [
        ("evaluation", "eval-gspo-1-key", None, None, None, None),
        ("screenshot", SEEN, None, None, f"blobs/55/{SEEN}.png", None),
        ("screenshot", SEEN, None, None, f"blobs/55/{SEEN}.jpeg", None),
        ("task", "t", None, None, None, None),
        ("checkpoint", "gspo-1", None, 0, "checkpoints/gspo-1", None),
        ("demonstration", D2, "injected", 0, "raw.jsonl", 2),
        ("group", "g0", "rolled_out", 0, None, None),
        ("group", "g1", "rolled_out", 0, None, None),
        ("checkpoint", "sft-1", None, 1, "checkpoints/sft-1", None),
        ("demonstration", D1, "fine_tuned", 1, "raw.jsonl", 1),
        ("checkpoint", "base-1", None, 2, "checkpoints/base-1", None),
    ]


def test_a_checkpoint_in_the_lineage_has_its_recipe_code_version_and_runs(state: StateDir) -> None:
    (reported,) = rows(
        state,
        "SELECT recipe->>'$.name', code_version, is_code_dirty, dagster_run_id, mlflow_run_id FROM lineage "
        "WHERE episode_id = 'eval-gspo-1' AND source_id = 'sft-1'",
    )
    assert reported == ("by-hand", "c0ffee", False, "dagster-sft-1", "mlflow-sft-1")


def test_a_milestone_was_made_by_the_groups_before_it_alone(state: StateDir) -> None:
    found = rows(state, "SELECT kind, source_id FROM made_from WHERE checkpoint_id = 'gspo-1-u0001' ORDER BY ALL")
    assert found == [("episode", "g0-s0"), ("episode", "g0-s1"), ("group", "g0")]


@pytest.mark.parametrize(
    ("row_id", "touched"),
    [(D1, ["eval-gspo-1", "eval-gspo-1-u0001", "eval-sft-1"]), (D2, ["eval-gspo-1"])],
    ids=["fine-tuned on", "injected"],
)
def test_a_demonstration_leads_to_every_evaluation_that_it_touched(
    state: StateDir, row_id: str, touched: list[str]
) -> None:
    sql = f"SELECT DISTINCT episode_id FROM lineage WHERE source_id = '{row_id}' ORDER BY episode_id"
    assert [name for (name,) in rows(state, sql)] == touched


def test_a_training_screenshot_leads_to_the_checkpoints_that_learned_from_it(state: StateDir) -> None:
    sql = f"""
        SELECT DISTINCT a.checkpoint_id FROM made_from m JOIN ancestry a ON a.ancestor_id = m.checkpoint_id
        WHERE m.source_id IN (SELECT episode_id FROM steps WHERE screenshot_sha256 = '{TRAINED}')
        ORDER BY a.checkpoint_id
    """
    assert [name for (name,) in rows(state, sql)] == ["gspo-1", "gspo-1-u0001"]


def test_the_ancestry_of_a_cycle_of_parents_ends(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    for name, parent in (("a", "b"), ("b", "a"), ("c", "a")):
        upsert_checkpoint(state, checkpoint(name, Stage.SFT, parent))
    rebuild_catalog(state)
    found = rows(state, "SELECT checkpoint_id, ancestor_id FROM ancestry WHERE checkpoint_id <> 'c' ORDER BY ALL")
    assert found == [("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]
    assert len(rows(state, "SELECT * FROM ancestry WHERE checkpoint_id = 'c'")) <= 1001


def named(link: Link, kind: str) -> list[str]:
    return [below.id for below in link.links if below.kind == kind]


def test_walking_from_an_evaluation_goes_down_to_the_base(state: StateDir) -> None:
    found = walk(state, "eval-gspo-1")
    assert (found.kind, named(found, "screenshot")) == ("evaluation episode", [SEEN, SEEN])
    line = []
    below = [link for link in found.links if link.kind == "checkpoint"]
    while below:
        line.append((below[0].id, named(below[0], "demonstration"), named(below[0], "group")))
        below = [link for link in below[0].links if link.kind == "parent"]
    assert line == [("gspo-1", [D2], ["g0", "g1"]), ("sft-1", [D1], []), ("base-1", [], [])]


def test_walking_from_a_demonstration_names_what_it_taught_and_the_evaluations_it_touched(state: StateDir) -> None:
    found = walk(state, D1)
    assert named(found, "taught") == ["sft-1", "gspo-1", "gspo-1-u0001"]
    assert named(found, "evaluation touched") == ["eval-gspo-1-key", "eval-gspo-1-u0001-key", "eval-sft-1-key"]


def test_walking_from_a_screenshot_names_what_shows_it_and_its_file(state: StateDir) -> None:
    found = walk(state, SEEN, limit=2)
    assert found.facts["path"] == f"blobs/55/{SEEN}.png"
    assert named(found, "shown by") == [D1, D2]
    assert [link.num_more for link in found.links if link.num_more] == [3]


@pytest.mark.parametrize(("thing", "kind"), [("t", "task"), ("gspo-1", "checkpoint"), ("g0-s0", "train episode")])
def test_every_kind_of_thing_is_found_by_its_id(state: StateDir, thing: str, kind: str) -> None:
    assert walk(state, thing).kind == kind


def test_an_unknown_id_is_one_clear_error_that_names_the_kinds_of_ids(state: StateDir) -> None:
    with pytest.raises(TableError, match=r"has the id 'it's'.*replay row"):
        walk(state, "it's")


PLACE = {"source_path": "raw.jsonl", "source_line": 7, "source_sha256": "a" * 64, "licence": "mit"}


def trained_once(tmp_path: Path, **place: Any) -> StateDir:
    """One checkpoint fine-tuned on D1, and one whose group D2 joined; the replay buffer holds neither."""
    state = StateDir(tmp_path)
    sources = (TrainedRow(row_id=D1, kind="demonstration", task_id="t", source_dataset="sft_clean", **place),)
    upsert_checkpoint(state, checkpoint("sft-1", Stage.SFT, None, row_ids=(D1,), sources=sources if place else ()))
    upsert_checkpoint(state, checkpoint("gspo-1", Stage.GSPO_PHASE1, "sft-1"))
    joined = Injection(
        injection_id="i0", group_id="g1", row_id=D2, task_id="t", source_dataset="sft_clean", reward=1.0,
        advantage=1.0, weight=1.0, kind="demonstration", **place,
    )  # fmt: skip
    TrajectoryStore(state).write_groups("training", [group("g1", 1)], [joined])
    rebuild_catalog(state)
    return state


def test_the_rows_of_a_training_are_found_even_if_the_replay_buffer_has_lost_them(tmp_path: Path) -> None:
    state = trained_once(tmp_path, **PLACE)
    sql = "SELECT source_id, how, path, line, sha256, licence FROM made_from WHERE kind = 'demonstration' ORDER BY ALL"
    place = tuple(PLACE.values())
    assert rows(state, sql) == [(D1, "fine_tuned", *place), (D2, "injected", *place)]
    assert rows(state, INJECTED_REPLAY_ROWS) == [("g1", D2, "t", "sft_clean", "raw.jsonl", 7, 1.0, 1.0, 1.0)]
    found = walk(state, D2)
    assert (found.kind, found.facts["path"], found.facts["line"]) == ("replay row", "raw.jsonl", 7)
    assert read_checkpoint_row(state, "sft-1").sources[0].source_sha256 == "a" * 64


def test_rows_that_an_older_version_trained_on_are_found_by_their_former_ids(tmp_path: Path) -> None:
    state = trained_once(tmp_path)
    buffer = [
        demonstration("e" * 24, 1) | {"former_row_id": D1, "quality_rank": 0},
        demonstration("f" * 24, 3) | {"former_row_id": D1},
        demonstration("a" * 24, 2) | {"former_row_id": D2},
    ]
    write_table(state, "replay_buffer", buffer)
    verified = ReplayVerification(
        verification_id="v", row_id=D2, task_id="t", task_digest="d", outcome=Outcome.SUCCESS, reward=1.0
    )
    TrajectoryStore(state).write_verifications("verify", [verified])
    rebuild_catalog(state)
    sql = "SELECT source_id, path, line FROM made_from WHERE kind = 'demonstration' ORDER BY ALL"
    assert rows(state, sql) == [(D1, "raw.jsonl", 3), (D2, "raw.jsonl", 2)]
    assert rows(state, "SELECT row_id, verified_reward FROM replay WHERE num_verifications > 0") == [("a" * 24, 1.0)]
    assert verified_rewards(state)["a" * 24] == 1.0
    assert {one.row_id for one in read_record(state)} == {"a" * 24}
