"""A GSPO phase with minimal episodes and a minimal trainer: in synchronous mode, a kill anywhere changes nothing that
is learned and recorded; in asynchronous mode, nothing is lost, counted twice or older than it may be."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from phase_samples import (
    NUM_UPDATES,
    STAGE,
    TASKS_PER_UPDATE,
    Fuse,
    Killed,
    job_of,
    recipe_of,
    recorded,
    rows_of,
    run_phase,
    without_times,
)

from osworld_pipeline.domain.episode import (
    Outcome,
)
from osworld_pipeline.errors import EngineError, EnvServerError
from osworld_pipeline.runs.budget import Budget
from osworld_pipeline.runs.checkpoints.ids import read_checkpoint
from osworld_pipeline.runs.gspo.superseding import supersede
from osworld_pipeline.store import TrajectoryStore

PLACES = [("episode", 1), ("episode", 13), ("write", 2), ("written", 3), ("update", 3), ("save", 2), ("saved", 3)]


@pytest.mark.parametrize(("place", "count"), PLACES)
@pytest.mark.parametrize("save_every", [1, 3])
def test_in_synchronous_mode_a_kill_changes_nothing_that_is_learned_and_recorded(
    tmp_path: Path, processor: Any, place: str, count: int, save_every: int
) -> None:
    if save_every > 1 and place in ("save", "saved"):
        count = 1
    recipe = recipe_of(zero_variance="top_up")
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"save_every": save_every})})
    straight, killed = job_of(tmp_path / "straight", recipe), job_of(tmp_path / "killed", recipe)
    whole = run_phase(straight, processor)
    run_phase(killed, processor, Fuse(place, count), fails=Killed)
    assert read_checkpoint(killed.state, STAGE) is None
    resumed = run_phase(killed, processor)
    assert resumed.trainer.weights_digest == whole.trainer.weights_digest
    assert without_times(recorded(killed)) == without_times(recorded(straight))
    assert len(recorded(killed)) == NUM_UPDATES
    numbers = "SELECT \"update\", weights_id, num_episodes, success_rate, metrics['loss'] FROM updates ORDER BY ALL"
    assert rows_of(killed, numbers) == rows_of(straight, numbers)
    assert [row[0] for row in rows_of(killed, numbers)] == [1, 2, 3, 4], "each once, whenever the kill came"
    checkpoint = read_checkpoint(killed.state, STAGE)
    assert checkpoint is not None
    assert checkpoint.num_updates == NUM_UPDATES


@pytest.mark.parametrize("handover_s", [0.0, 0.02])
@pytest.mark.parametrize(("place", "count"), [*PLACES, ("handover", 2)])
def test_in_asynchronous_mode_a_kill_loses_no_group_and_counts_none_twice(
    tmp_path: Path, processor: Any, place: str, count: int, handover_s: float
) -> None:
    job = job_of(tmp_path, recipe_of(mode="asynchronous", max_staleness=1))
    run_phase(job, processor, Fuse(place, count), handover_s=handover_s, fails=Killed)
    first = run_phase(job, processor, handover_s=handover_s)
    assert {update for update, _ in first.trainer.seen} == set(range(NUM_UPDATES - len(first.metrics), NUM_UPDATES))
    for update, trajectories in first.trainer.seen:
        versions = [version for one in trajectories for version in one.policy_versions or () if version >= 0]
        assert all(update - 1 <= version <= update for version in versions)
    found = recorded(job)
    assert set(found) == {f"{STAGE}-u{update:04d}" for update in range(NUM_UPDATES)}
    ids = Counter(one.episode_id for episodes in found.values() for one in episodes)
    assert set(ids.values()) == {1}
    groups = {one.group_id for episodes in found.values() for one in episodes}
    assert groups == {f"{STAGE}-g{serial:06d}" for serial in range(len(groups))}
    assert all(one.update == int(part[-4:]) for part, episodes in found.items() for one in episodes)


@pytest.mark.parametrize(
    ("max_staleness", "handover_s"), [(0, 0.0), (0, 0.05), (1, 0.0), (1, 20.0), (3, 0.0), (3, 20.0)]
)
def test_every_update_has_a_token_sampled_from_its_own_weights_to_compare(
    tmp_path: Path, processor: Any, max_staleness: int, handover_s: float
) -> None:
    job = job_of(tmp_path, recipe_of(mode="asynchronous", max_staleness=max_staleness))
    ran = run_phase(job, processor, handover_s=handover_s)
    num_canaries = 0
    for update, trajectories in ran.trainer.seen:
        canaries = [one for one in trajectories if one.is_canary]
        is_fresh = any(update in (one.policy_versions or ()) for one in trajectories if not one.is_canary)
        assert len(canaries) == int(bool(trajectories) and not is_fresh)
        num_canaries += len(canaries)
    assert max_staleness < 3 or num_canaries > 0
    # With a bound of 0 there is nothing to score before the weights have arrived.
    assert (ran.trainer.num_late > 0) == (handover_s > 0 and max_staleness > 0)


def test_a_synchronous_phase_collects_nothing_before_its_weights_have_arrived(tmp_path: Path, processor: Any) -> None:
    quick, slow = (job_of(tmp_path / name, recipe_of()) for name in ("quick", "slow"))
    at_once, late = run_phase(quick, processor), run_phase(slow, processor, handover_s=0.05)
    assert late.trainer.num_late == 0
    assert late.trainer.weights_digest == at_once.trainer.weights_digest
    assert late.metrics[2]["handover_s"] > 0.05 > at_once.metrics[2]["handover_s"]


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("handover_s", [0.0, 0.02])
def test_weights_that_do_not_arrive_end_the_phase(tmp_path: Path, processor: Any, mode: str, handover_s: float) -> None:
    fuse = Fuse("handover", 2, raises=EngineError("no server took the weights"))
    job = job_of(tmp_path, recipe_of(mode=mode))
    ran = run_phase(job, processor, fuse, handover_s=handover_s, fails=EngineError)
    assert ran.error == "no server took the weights"
    assert ran.trainer.num_updates == 2, "nothing was trained that could not be compared"


def test_records_beyond_the_checkpoint_are_superseded_before_any_new_rollout(tmp_path: Path, processor: Any) -> None:
    recipe = recipe_of(mode="asynchronous")
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"save_every": 2})})
    job = job_of(tmp_path, recipe)
    run_phase(job, processor, Fuse("update", 4), fails=Killed)
    assert set(recorded(job)) == {f"{STAGE}-u{update:04d}" for update in range(4)}
    assert [row[0] for row in rows_of(job, 'SELECT "update" FROM updates ORDER BY 1')] == [1, 2, 3]
    before = recorded(job)
    run_phase(job, processor, Fuse("episode", 1), fails=Killed)
    assert set(recorded(job)) == {f"{STAGE}-u{update:04d}" for update in range(2)}
    assert [row[0] for row in rows_of(job, 'SELECT "update" FROM updates ORDER BY 1')] == [1, 2]
    lost = [one for part in sorted(before)[2:] for one in before[part]]
    marked = rows_of(job, "SELECT episode_id, task_reward FROM episodes WHERE purpose = 'superseded' ORDER BY 1")
    assert [(one.rpartition("-superseded-")[0], reward) for one, reward in marked] == sorted(
        (one.episode_id, one.reward.task if one.reward else None) for one in lost
    )
    groups = rows_of(job, "SELECT group_id, reason, episode_ids FROM rollout_groups WHERE fate = 'superseded'")
    assert {name.rpartition("-superseded-")[0] for name, _, _ in groups} == {one.group_id for one in lost}
    assert all("resumed after 2 updates" in reason for _, reason, _ in groups)
    assert sorted(name for _, _, names in groups for name in names) == [name for name, _ in marked]
    steps = rows_of(job, "SELECT count(*) FROM steps WHERE purpose = 'superseded'")
    assert steps == [(sum(len(one.steps) for one in lost),)]


def test_superseding_that_was_killed_and_runs_again_keeps_one_copy(tmp_path: Path, processor: Any) -> None:
    job = job_of(tmp_path, recipe_of(mode="asynchronous"))
    run_phase(job, processor, Fuse("update", 2), fails=Killed)
    part = f"{STAGE}-u0001"

    class Dying(TrajectoryStore):
        def write_groups(self, part: str, groups: Any, injections: Any) -> None:
            raise Killed

    with pytest.raises(Killed):
        supersede(Dying(job.state), STAGE, 1)
    assert part in recorded(job), "the originals are still there, and so are their copies"
    for _ in range(2):
        supersede(TrajectoryStore(job.state), STAGE, 1)
        assert part not in recorded(job)
        (counted,) = rows_of(
            job, "SELECT count(*), count(DISTINCT episode_id) FROM episodes WHERE purpose = 'superseded'"
        )
        assert counted[0] == counted[1] > 0
        assert len(rows_of(job, "SELECT * FROM rollout_groups WHERE fate = 'superseded'")) * 4 == counted[0]
        strays = "FROM episodes ANTI JOIN rollout_groups USING (group_id) WHERE purpose = 'superseded'"
        assert rows_of(job, f"SELECT episode_id {strays}") == []


def test_superseded_episodes_whose_groups_were_never_recorded_name_no_group(tmp_path: Path, processor: Any) -> None:
    job = job_of(tmp_path, recipe_of(mode="asynchronous"))
    run_phase(job, processor, Fuse("write", 2), fails=Killed)
    supersede(TrajectoryStore(job.state), STAGE, 1)
    marked = rows_of(job, "SELECT count(*), count(group_id) FROM episodes WHERE purpose = 'superseded'")
    assert marked[0][0] > 0
    assert marked[0][1] == 0
    assert rows_of(job, "SELECT count(*) FROM rollout_groups WHERE fate = 'superseded'") == [(0,)]


SPENT = {
    "retraining.max_wall_s": Budget(deadline=time.time() - 1),
    "retraining.max_episodes": Budget(episodes=1),
    "retraining.max_tokens": Budget(tokens=16),
}
"""Each is spent by one update of eight episodes with two tokens each."""


@pytest.mark.parametrize("key", SPENT)
@pytest.mark.parametrize("save_every", [1, 3])
def test_a_spent_budget_leaves_a_milestone_and_the_phase_can_continue_to_the_same_result(
    tmp_path: Path, processor: Any, key: str, save_every: int
) -> None:
    recipe = recipe_of()
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"save_every": save_every})})
    straight, limited = job_of(tmp_path / "straight", recipe), job_of(tmp_path / "limited", recipe)
    whole = run_phase(straight, processor)
    assert whole.result == {"checkpoint_id": STAGE}
    for update in range(1, NUM_UPDATES):
        stopped = run_phase(limited.model_copy(update={"budget": SPENT[key]}), processor)
        assert sorted(stopped.metrics) == [update], "one update, however little is left"
        assert key in stopped.result["stopped"]
        milestone = read_checkpoint(limited.state, stopped.result["checkpoint_id"])
        assert milestone is not None
        assert (milestone.checkpoint_id, milestone.num_updates) == (f"{STAGE}-u{update:04d}", update)
        assert read_checkpoint(limited.state, STAGE) is None
    last = run_phase(limited.model_copy(update={"budget": SPENT[key]}), processor)
    assert last.result == {"checkpoint_id": STAGE}, "the last update ends the phase, whatever is left"
    assert last.trainer.weights_digest == whole.trainer.weights_digest
    assert without_times(recorded(limited)) == without_times(recorded(straight))


def test_a_budget_is_checked_after_each_update_and_counts_the_episodes_of_all_updates(
    tmp_path: Path, processor: Any
) -> None:
    job = job_of(tmp_path, recipe_of())
    stopped = run_phase(job.model_copy(update={"budget": Budget(episodes=4 * TASKS_PER_UPDATE + 1)}), processor)
    assert sorted(stopped.metrics) == [1, 2]


def test_in_asynchronous_mode_a_spent_budget_loses_no_group_and_counts_none_twice(
    tmp_path: Path, processor: Any
) -> None:
    job = job_of(tmp_path, recipe_of(mode="asynchronous", max_staleness=1))
    run_phase(job.model_copy(update={"budget": Budget(episodes=1)}), processor)
    assert set(recorded(job)) == {f"{STAGE}-u0000"}
    run_phase(job, processor)
    found = recorded(job)
    assert set(found) == {f"{STAGE}-u{update:04d}" for update in range(NUM_UPDATES)}
    assert set(Counter(one.episode_id for episodes in found.values() for one in episodes).values()) == {1}


def test_figures_of_an_update_include_every_fate_of_groups_and_every_busy_share(tmp_path: Path, processor: Any) -> None:
    ran = run_phase(job_of(tmp_path, recipe_of(mode="asynchronous", max_staleness=2)), processor)
    assert sorted(ran.metrics) == [1, 2, 3, 4]
    for figures in ran.metrics.values():
        statuses = [
            figures[f"num_{status}_groups"] for status in ("trained", "zero_variance", "too_few_valid", "stale")
        ]
        assert sum(statuses) >= TASKS_PER_UPDATE
        assert figures["num_episodes"] == sum(statuses) * 4
        assert 0 <= figures["group_staleness_max"] <= 2
        assert 0 < figures["environments_busy_overall"] <= 1
        assert 0 <= figures["trainer_busy"] <= 1


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(("fault", "error"), [(Outcome.POLICY_FAULT, EngineError), (Outcome.ENV_FAULT, EnvServerError)])
def test_an_engine_or_desktops_that_are_down_end_the_phase_in_one_sentence(
    tmp_path: Path, processor: Any, mode: str, fault: Outcome, error: type[Exception]
) -> None:
    job = job_of(tmp_path, recipe_of(mode=mode))
    with pytest.raises(error, match=f"all 8 episodes ended in an? {fault}; the first: it is down"):
        run_phase(job, processor, faults=lambda _: fault)
    assert recorded(job) == {}


def test_a_phase_in_which_every_episode_times_out_trains_nothing_and_records_the_reason(
    tmp_path: Path, processor: Any
) -> None:
    job = job_of(tmp_path, recipe_of(max_resamples=0, max_fault_share=1.0))
    ran = run_phase(job, processor, faults=lambda _: Outcome.TIMEOUT)
    assert [len(trajectories) for _, trajectories in ran.trainer.seen] == [0] * NUM_UPDATES
    assert all(figures["num_too_few_valid_groups"] == TASKS_PER_UPDATE for figures in ran.metrics.values())


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_groups_that_failed_or_succeeded_as_a_whole_are_topped_up_though_their_shaped_rewards_differ(
    tmp_path: Path, processor: Any, mode: str
) -> None:
    recipe = recipe_of(mode=mode, zero_variance="top_up")
    # Pairs: every second group fails or succeeds as a whole.
    job = job_of(tmp_path, recipe.model_copy(update={"gspo": recipe.gspo.model_copy(update={"group_size": 2})}))
    statuses: Counter[str] = Counter()
    for update, trajectories in run_phase(job, processor).trainer.seen:
        part = recorded(job)[f"{STAGE}-u{update:04d}"]
        groups = {one.group_id: [other for other in part if other.group_id == one.group_id] for one in part}
        mixed = {name for name, episodes in groups.items() if len({one.is_success for one in episodes}) == 2}
        assert {one.trajectory_id for one in trajectories if not one.is_canary} == {
            one.episode_id for name in mixed for one in groups[name]
        }
        statuses.update(["mixed"] * len(mixed), flat=len(groups) - len(mixed))
    assert statuses["mixed"] >= 1
    assert statuses["flat"] >= 1 or mode == "asynchronous", "synchronous, it is the same every time"
