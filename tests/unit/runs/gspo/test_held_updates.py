"""An update with too many faults is held: its groups run again, and nothing of it is trained or counted twice."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from phase_samples import (
    NUM_UPDATES,
    STAGE,
    TASKS_PER_UPDATE,
    Faults,
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
    Episode,
    Outcome,
)
from osworld_pipeline.errors import EnvServerError, EvaluatorError
from osworld_pipeline.runs.budget import Budget
from osworld_pipeline.runs.gspo.job import GspoJob
from osworld_pipeline.runs.messages import Metrics
from osworld_pipeline.tables.catalog import fresh_views

PER_UPDATE = 4 * TASKS_PER_UPDATE


def outage(numbers: range, fault: Outcome = Outcome.ENV_FAULT) -> Faults:
    return lambda number: fault if number in numbers else None


def groups_of(job: GspoJob) -> dict[str, tuple[str, str]]:
    """Fate and reason by group."""
    with fresh_views(job.state) as views:
        rows = views.execute("SELECT group_id, fate, reason FROM rollout_groups").fetchall()
    assert len({row[0] for row in rows}) == len(rows)
    return {name: (status, reason) for name, status, reason in rows}


def unheld(found: Mapping[str, Sequence[Episode]]) -> dict[str, list[Episode]]:
    return {part: [one for one in episodes if "-held-" not in one.episode_id] for part, episodes in found.items()}


def test_an_update_of_faults_is_held_and_then_trains_what_it_would_have_trained_without_them(
    tmp_path: Path, processor: Any
) -> None:
    recipe = recipe_of(held_pause_s=0, zero_variance="top_up")
    straight, disturbed = job_of(tmp_path / "straight", recipe), job_of(tmp_path / "disturbed", recipe)
    whole = run_phase(straight, processor)
    num_first = len(recorded(straight)[f"{STAGE}-u0000"])
    ran = run_phase(disturbed, processor, faults=outage(range(num_first, num_first + 2 * PER_UPDATE)))
    assert ran.trainer.weights_digest == whole.trainer.weights_digest
    assert [update for update, _ in ran.trainer.seen] == list(range(NUM_UPDATES))
    assert without_times(unheld(recorded(disturbed))) == without_times(recorded(straight))
    held = {name: reported for name, reported in groups_of(disturbed).items() if reported[0] == "held"}
    assert set(held) == {f"{STAGE}-u0001-g{index:02d}-held-1-1" for index in range(TASKS_PER_UPDATE)}
    (reason,) = {reason for _, reason in held.values()}
    assert reason == (
        "16 of 16 episodes ended in faults, more than rollout.max_fault_share = 0.5 allows; the most frequent was "
        "env_fault (16 times): it is down"
    )
    ids = [one.episode_id for one in recorded(disturbed)[f"{STAGE}-u0001"]]
    assert len(ids) == len(set(ids))
    assert f"{STAGE}-u0001-g00-held-1-1-s00-r1" in ids
    reported = [one.metrics for one in ran.reported if isinstance(one, Metrics) and one.update == 2]
    assert [one["is_held"] for one in reported] == [1, 0]
    assert [one["is_held_by_faults"] for one in reported] == [1, 0]
    assert [one["fault_share"] for one in reported] == [1, 0]
    assert (reported[0]["num_held_groups"], reported[1]["num_held_tries"]) == (TASKS_PER_UPDATE, 1)
    (warning,) = ran.warnings
    assert warning.startswith("update 2 is held: 16 of 16 episodes ended in faults")
    assert warning.endswith("run again in 0 s (held 1 of 3 times)")


def test_a_lasting_outage_ends_training_with_the_most_common_fault_and_leaves_the_weights_unchanged(
    tmp_path: Path, processor: Any
) -> None:
    recipe = recipe_of(held_pause_s=0, max_held_updates=2)
    straight, job = job_of(tmp_path / "straight", recipe), job_of(tmp_path / "down", recipe)
    whole = run_phase(straight, processor)

    def faults(number: int) -> Outcome | None:
        fault = Outcome.GRADER_FAULT if number % 4 else Outcome.TIMEOUT
        return fault if number >= PER_UPDATE and number % 12 else None

    ran = run_phase(job, processor, faults=faults, fails=EvaluatorError)
    assert ran.error.startswith("update 2 was held 2 times in a row (rollout.max_held_updates): ")
    assert "the most frequent was grader_fault (" in ran.error
    assert [update for update, _ in ran.trainer.seen] == [0]
    tries = {name.partition("-held-")[2] for name, (status, _) in groups_of(job).items() if status == "held"}
    assert tries == {"1-1", "1-2"}
    assert ran.metrics[2]["is_held"] == 1
    assert ran.metrics[2]["fault_share"] > 0.5
    held = 'SELECT "update", is_held, held_reason, num_held_tries, fault_share > 0.5, loss FROM updates ORDER BY 1'
    assert rows_of(job, held) == [(1, False, None, 0, False, 0.0), (2, True, "faults", 2, True, None)]
    (status, error) = rows_of(job, "SELECT status, error FROM stages")[0]
    assert (status, error) == ("failed", f"EvaluatorError: {ran.error}")
    assert run_phase(job, processor).trainer.weights_digest == whole.trainer.weights_digest
    assert without_times(recorded(job)) == without_times(recorded(straight)), "a rerun replaces what was held"


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_storm_of_failed_resets_costs_a_bounded_number_of_episodes(tmp_path: Path, processor: Any, mode: str) -> None:
    """Each try of an update runs the groups of each update in flight once, and their faulty members once more."""
    num_in_flight = {"synchronous": 1, "asynchronous": 3}[mode]
    recipe = recipe_of(mode=mode, max_staleness=2, held_pause_s=0, max_held_updates=3, zero_variance="top_up")
    job = job_of(tmp_path, recipe)
    begun: list[int] = []

    def faults(number: int) -> Outcome | None:
        begun.append(number)
        return Outcome.ENV_FAULT if number >= PER_UPDATE else None

    ran = run_phase(job, processor, faults=faults, fails=EnvServerError)
    assert "was held 3 times in a row" in ran.error
    assert len(begun) - PER_UPDATE <= 3 * num_in_flight * 2 * PER_UPDATE


@pytest.mark.parametrize(("place", "count"), [("episode", 20), ("write", 2), ("written", 2), ("episode", 30)])
def test_a_kill_around_a_held_update_changes_nothing_that_is_learned(
    tmp_path: Path, processor: Any, place: str, count: int
) -> None:
    recipe = recipe_of(held_pause_s=0)
    straight, killed = job_of(tmp_path / "straight", recipe), job_of(tmp_path / "killed", recipe)
    whole = run_phase(straight, processor)
    down = outage(range(PER_UPDATE, 3 * PER_UPDATE))
    run_phase(killed, processor, Fuse(place, count), faults=down, fails=Killed)
    # The first try of the resumed process is held, too.
    resumed = run_phase(killed, processor, faults=outage(range(1, 2 * PER_UPDATE - 1)))
    assert resumed.trainer.weights_digest == whole.trainer.weights_digest
    assert without_times(unheld(recorded(killed))) == without_times(recorded(straight))


def test_in_asynchronous_mode_a_held_update_continues_with_new_rollouts_and_counts_none_twice(
    tmp_path: Path, processor: Any
) -> None:
    job = job_of(tmp_path, recipe_of(mode="asynchronous", max_staleness=2, held_pause_s=0, max_held_updates=5))
    ran = run_phase(job, processor, faults=outage(range(10, 60)))
    assert [update for update, _ in ran.trainer.seen] == list(range(NUM_UPDATES))
    assert sum(figures["num_held_tries"] for figures in ran.metrics.values()) >= 1
    assert all(figures["fault_share"] <= 0.5 for figures in ran.metrics.values())
    found = recorded(job)
    ids = Counter(one.episode_id for episodes in found.values() for one in episodes)
    assert set(ids.values()) == {1}
    groups = groups_of(job)
    serials = {name for name in groups if "-held-" not in name}
    assert serials == {f"{STAGE}-g{serial:06d}" for serial in range(len(serials))}, "held groups run again"
    for part, episodes in unheld(found).items():
        assert all(one.update == int(part[-4:]) for one in episodes)
        assert sum(not one.outcome.is_valid for one in episodes) <= len(episodes) / 2


@pytest.mark.parametrize(("max_fault_share", "is_held"), [(0.49, 1.0), (0.5, 0.0), (1.0, 0.0)])
def test_an_update_is_held_only_above_the_maximum_share_of_faults(
    tmp_path: Path, processor: Any, max_fault_share: float, is_held: float
) -> None:
    recipe = recipe_of(max_fault_share=max_fault_share, held_pause_s=0, max_concurrent_episodes=1)
    # Two faults in a group of four: no episode is resampled.
    ran = run_phase(
        job_of(tmp_path, recipe), processor, faults=lambda number: Outcome.TIMEOUT if number in (0, 2, 5, 7) else None
    )
    first = next(one.metrics for one in ran.reported if isinstance(one, Metrics))
    assert (first["is_held"], first["fault_share"]) == (is_held, 0.5)


def test_episodes_of_held_tries_count_in_the_budget(tmp_path: Path, processor: Any) -> None:
    job = job_of(tmp_path, recipe_of(held_pause_s=0))
    budget = Budget(episodes=PER_UPDATE + 1)
    job = job.model_copy(update={"budget": budget})
    stopped = run_phase(job, processor, faults=outage(range(1, 2 * PER_UPDATE - 1)))
    assert sorted(stopped.metrics) == [1], "a held try and a whole one"
    assert "retraining.max_episodes" in stopped.result["stopped"]
