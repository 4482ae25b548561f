"""A budget: what is left of it, and that the store counts what a run has spent, even if it was killed many times."""

from dataclasses import replace
from pathlib import Path

import pytest
from episode_samples import make_episode, make_step
from replay_samples import rollout

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.budget import UNLIMITED, Budget, Spent, read_spent, spent_by, whole_budget
from osworld_pipeline.store import TrajectoryStore


@pytest.mark.parametrize(
    ("budget", "key"),
    [
        (Budget(deadline=100.0), "retraining.max_wall_s"),
        (Budget(episodes=0), "retraining.max_episodes"),
        (Budget(episodes=-3), "retraining.max_episodes"),
        (Budget(tokens=0), "retraining.max_tokens"),
    ],
)
def test_a_spent_budget_names_the_key_that_sets_it(budget: Budget, key: str) -> None:
    assert key in budget.end_reason(now=100.0)


def test_a_budget_that_is_not_spent_or_has_no_limit_ends_nothing() -> None:
    assert Budget(deadline=100.1, episodes=1, tokens=1).end_reason(now=100.0) == ""
    assert UNLIMITED.less(Spent(episodes=10**9, tokens=10**12)).end_reason(now=1e12) == ""


def test_a_re_training_has_the_budget_of_the_recipe_from_its_start_on() -> None:
    recipe = load_recipe("smoke", settings=["retraining.max_wall_s=60", "retraining.max_episodes=5"])
    left = whole_budget(recipe.retraining, began_at=1000.0).less(Spent(episodes=2, tokens=900))
    assert left == Budget(deadline=1060.0, episodes=3, tokens=None)


def test_the_store_counts_what_a_run_has_spent_and_counts_a_rerun_once(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    store = TrajectoryStore(state)
    assert read_spent(state, "run-1") == Spent()
    steps = tuple(replace(make_step(index), response_num_tokens=7) for index in range(2))
    mine = [rollout(name, steps=steps, run_ids={"dagster": "run-1"}) for name in "ab"]
    fault = rollout("c", None, steps=(), run_ids={"dagster": "run-1"})
    for _ in range(2):
        store.write_episodes("stage-u0000", [*mine, fault])
    store.write_episodes("other", [make_episode("d", run_ids={"dagster": "run-2"}), make_episode("e", run_ids={})])
    assert read_spent(state, "run-1") == Spent(episodes=3, tokens=28) == spent_by([*mine, fault])
