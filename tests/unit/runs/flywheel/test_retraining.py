"""When the champion is trained further: after enough new successes or on other data, and not repeatedly in vain."""

import os
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import lay_down, make_checkpoint
from replay_samples import rollout, write_verifications

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.checkpoints.ids import CARD
from osworld_pipeline.runs.flywheel.retraining import Decision, NewData, Retraining, decide, last_look, new_data_since
from osworld_pipeline.store import TrajectoryStore

SECTION = load_recipe("smoke", settings=["retraining.min_new_successes=10", "retraining.patience=2"]).retraining
MADE_AT = 1000.0


def new_data(*, verified: int = 0, rolled_out: int = 0, by_retrainings: int = 0, is_data_new: bool = False) -> NewData:
    return NewData(verified=verified, rolled_out=rolled_out, by_retrainings=by_retrainings, is_data_new=is_data_new)


def history(*champions: str) -> list[Retraining]:
    """One re-training of each of these champions, the newest first."""
    return [
        Retraining(run_id=f"run-{number}", champion_id=champion, began_at=MADE_AT + number)
        for number, champion in reversed(list(enumerate(reversed(champions), start=1)))
    ]


def asked(*champions: str, is_scheduled: bool = False, **what: Any) -> Decision:
    return decide(SECTION, "x", history(*champions), new_data(**what), is_scheduled=is_scheduled)


@pytest.mark.parametrize(
    "what", [{"verified": 10}, {"rolled_out": 10}, {"verified": 4, "rolled_out": 3, "by_retrainings": 3}]
)
def test_enough_new_successes_of_any_kind_make_a_re_training_due(what: dict[str, int]) -> None:
    assert asked(**what) == Decision(is_due=True, reason="10 of 10 new successes")


def test_too_few_new_successes_delay_a_re_training_unless_it_is_scheduled() -> None:
    waiting = asked(verified=4, rolled_out=5)
    assert not waiting.is_due
    assert "9 of 10 new successes" in waiting.reason
    assert asked(verified=4, rolled_out=5, is_scheduled=True).is_due


def test_other_data_make_a_re_training_due_without_a_success() -> None:
    assert asked(is_data_new=True).is_due


@pytest.mark.parametrize("is_scheduled", [True, False])
@pytest.mark.parametrize("champions", [("x", "x"), ("x", "x", "x", "w"), ("x", "by hand", "x")])
def test_after_re_trainings_in_vain_only_new_data_start_another(champions: tuple[str, ...], is_scheduled: bool) -> None:
    stopped = asked(*champions, by_retrainings=500, rolled_out=9, is_scheduled=is_scheduled)
    assert not stopped.is_due
    assert "brought no new champion" in stopped.reason
    assert asked(*champions, is_data_new=True, is_scheduled=is_scheduled).is_due
    assert asked(*champions, rolled_out=6, verified=4, is_scheduled=is_scheduled).is_due


@pytest.mark.parametrize("champions", [(), ("x",), ("w", "w", "w"), ("x", "w", "w")])
def test_re_trainings_of_earlier_champions_do_not_count_as_in_vain(champions: tuple[str, ...]) -> None:
    assert asked(*champions, by_retrainings=10).is_due


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    """A state with a champion x that was made at MADE_AT."""
    state = StateDir(tmp_path)
    lay_down(state, make_checkpoint("x"))
    os.utime(state.checkpoints / "x" / CARD, (MADE_AT, MADE_AT))
    return state


def test_new_data_count_from_the_last_re_training_or_else_from_the_champion(state: StateDir) -> None:
    assert last_look(state, "x", []) == MADE_AT
    assert last_look(state, "x", history("w", "x")) == MADE_AT + 2


def test_new_data_are_graded_training_successes_and_demonstrations_that_were_first_verified_since(
    state: StateDir,
) -> None:
    def played(name: str, reward: float | None, at: float, *, run: str = "", **changes: Any) -> None:
        episode = rollout(name, reward, started_at=at, run_ids={"dagster": run} if run else {}, **changes)
        TrajectoryStore(state).write_episodes(name, [episode])

    played("old", 1.0, MADE_AT - 1)
    played("new", 1.0, MADE_AT + 3)
    played("half", 0.5, MADE_AT + 3)
    played("failed", 0.0, MADE_AT + 3)
    played("fault", None, MADE_AT + 3)
    played("evaluated", 1.0, MADE_AT + 3, purpose="evaluate")
    played("own", 1.0, MADE_AT + 3, run="run-2")
    played("other", 1.0, MADE_AT + 3, run="run-1")
    write_verifications(state, {"known": 1.0}, attempt=int(MADE_AT) - 5)
    write_verifications(state, {"known": 1.0, "proven": 1.0, "refuted": 0.0, "open": None}, attempt=int(MADE_AT) + 5)
    first = new_data_since(state, "x", [], threshold=0.5, is_data_new=False)
    assert first == new_data(verified=1, rolled_out=4)
    later = new_data_since(state, "x", history("x", "w"), threshold=0.5, is_data_new=True)
    assert later == new_data(verified=1, rolled_out=3, by_retrainings=1, is_data_new=True)
    assert new_data_since(state, "x", [], threshold=0.9, is_data_new=False) == new_data(verified=1, rolled_out=3)
