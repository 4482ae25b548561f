"""Groups with the advantages used in training, and two checkpoints compared task by task."""

import math
from pathlib import Path

import pytest
from effect_samples import ENDS, START, write_three_runs
from episode_samples import make_episode
from viewer_samples import GSPO, KEY, SFT, TASKS

from osworld_pipeline.domain.episode import Outcome, Reward
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.changes import Training
from osworld_pipeline.evaluation.scores import read_evals
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.checkpoints import read_checkpoints
from osworld_pipeline.training.objective.advantage import compute_advantages
from osworld_pipeline.web.viewer.comparing import compare, list_evaluated
from osworld_pipeline.web.viewer.evaluations import Evaluations
from osworld_pipeline.web.viewer.groups import list_groups, read_group
from osworld_pipeline.web.viewer.index import EpisodeIndex
from osworld_pipeline.web.viewer.settings import NotFoundError


@pytest.fixture
def index(sample_index: EpisodeIndex) -> EpisodeIndex:
    return sample_index


def test_advantages_are_those_of_training_with_the_replay_row_as_one_more_sample(index: EpisodeIndex) -> None:
    with index.reading() as reader:
        group = read_group(reader, f"{GSPO}-u0000-g00")
    *own, _ = compute_advantages([0.1, 0.3, 0.2, 1.0])
    assert [one["advantage"] for one in group.siblings] == pytest.approx([*own, None])
    assert [one["outcome"] for one in group.siblings][-1] == "policy_fault"
    assert [one["row_id"] for one in group.injections] == ["9ab9cfcd7089f3a6848918f4"]
    assert group.num_missing == 0


def test_a_group_without_its_row_is_built_from_its_episodes(own_state: StateDir) -> None:
    index = EpisodeIndex(own_state)
    index.refresh()
    for path in (own_state.trajectories / "rollout_groups").glob("*u0001*"):
        path.unlink()
    index.refresh(at_once=True)
    with index.reading() as reader:
        group = read_group(reader, f"{GSPO}-u0001-g00")
        assert len(group.siblings) == 4
        assert group.row["fate"] == ""
        with pytest.raises(NotFoundError, match="no rollout group"):
            read_group(reader, "nobody")


def test_groups_are_found_by_stage_fate_task_and_run(index: EpisodeIndex) -> None:
    with index.reading() as reader:
        rows, total = list_groups(reader, run=GSPO, fate="trained", task=TASKS[1][0], mlflow="abc123")
        assert (total, [row["update"] for row in rows]) == (2, [2, 1])
        assert (rows[0]["lowest"], rows[0]["highest"]) == (0.2, 0.9)
        assert list_groups(reader, mlflow="another") == ([], 0)


def test_the_comparison_agrees_with_the_evaluations(index: EpisodeIndex, sample_state: StateDir) -> None:
    with index.reading() as reader:
        evaluated = list_evaluated(reader, Evaluations(sample_state, index).names(reader))
        found = compare(reader, SFT, GSPO, KEY, Training(read_checkpoints(sample_state)))
    rows = read_evals(sample_state)
    for one in evaluated:
        mine = [row for row in rows if row.checkpoint_id == one.checkpoint_id and row.evaluation_key == one.settings]
        assert (one.num_episodes, one.num_valid) == (len(mine), sum(row.is_valid for row in mine))
        assert one.num_successes == sum(row.is_success for row in mine)
    assert found.alone.effect is not None
    assert found.alone.effect.comparison.difference == pytest.approx(
        sum(pair.difference for pair in found.pairs if pair.difference is not None) / 6
    )
    assert [pair.kind for pair in found.pairs] == ["gained"] * 5 + ["same", "not compared"]
    assert not math.isnan(found.alone.effect.comparison.p_value)
    assert found.across is None, "one run of GSPO"


def test_a_fault_is_not_a_failure_in_a_comparison(index: EpisodeIndex, sample_state: StateDir) -> None:
    with index.reading() as reader:
        pair = next(
            one
            for one in compare(reader, SFT, GSPO, KEY, Training(read_checkpoints(sample_state))).pairs
            if one.task_key == TASKS[5][0]
        )
    assert [row["outcome"] for row in pair.before] == ["truncated", "env_fault"]
    assert pair.difference == 1.0


def test_tasks_of_two_domains_with_the_same_id_are_compared_separately(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    episodes = [
        make_episode(
            f"{checkpoint_id}-{domain}",
            task_id="twin",
            domain=domain,
            checkpoint_id=checkpoint_id,
            stage_key=f"eval-{checkpoint_id}-{KEY}",
            outcome=Outcome.SUCCESS if domain == solved else Outcome.FAILURE,
            reward=Reward(task=float(domain == solved)),
        )
        for checkpoint_id, solved in ((SFT, "vlc"), (GSPO, "chrome"))
        for domain in ("chrome", "vlc")
    ]
    TrajectoryStore(state).write_episodes("evaluations", episodes)
    index = EpisodeIndex(state)
    index.refresh()
    with index.reading() as reader:
        pairs = compare(reader, SFT, GSPO, KEY, Training(read_checkpoints(state))).pairs
    index.close()
    assert [(pair.task_key, pair.kind) for pair in pairs] == [("chrome/twin", "gained"), ("vlc/twin", "lost")]


def test_runs_that_differ_in_seeds_alone_are_judged_together(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    write_three_runs(state)
    index = EpisodeIndex(state)
    index.refresh()
    with index.reading() as reader:
        (key,) = {one.settings for one in list_evaluated(reader, Evaluations(state, index).names(reader))}
        training = Training(read_checkpoints(state))
        run = compare(reader, START.checkpoint_id, ENDS[1].checkpoint_id, key, training)
        unrelated = compare(reader, ENDS[0].checkpoint_id, ENDS[1].checkpoint_id, key, training)
    index.close()
    assert run.alone.effect is not None
    assert run.alone.effect.words == "one run: better"
    assert run.alone.effect.comparison.difference == pytest.approx(12 / 28)
    assert run.across is not None
    assert run.across.effect is not None
    assert run.across.effect.words == "effect over 3 runs: better"
    assert set(run.across.ends) == {end.checkpoint_id for end in ENDS}
    assert unrelated.across is None, "neither was trained from the other"
