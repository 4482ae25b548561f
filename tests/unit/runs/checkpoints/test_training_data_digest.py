"""The digest of the data that a stage trains on: it changes with what is learned, and with nothing else."""

import json
from pathlib import Path

import pytest
from replay_samples import make_row, write_rows, write_verification

from osworld_pipeline.domain.checkpoint import Ancestor, Checkpoint, Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes.schema import ReplaySection
from osworld_pipeline.runs.checkpoints.ids import CARD, checkpoint_card, checkpoint_lineage, training_data_digest

REPLAY = ["replay_buffer"]


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return write_rows(StateDir(tmp_path), make_row("a"), make_row("b", reward=0.4))


def test_the_order_of_rows_changes_no_digest(state: StateDir) -> None:
    before = training_data_digest(state, REPLAY)
    assert training_data_digest(write_rows(state, make_row("b", reward=0.4), make_row("a")), REPLAY) == before


@pytest.mark.parametrize("change", [{"reward": 0.9}, {"quality_rank": 3}, {"images": ["f" * 64]}])
def test_any_change_of_what_a_row_teaches_changes_the_digest(state: StateDir, change: dict) -> None:
    before = training_data_digest(state, REPLAY, replay=ReplaySection())
    write_rows(state, make_row("a", **change), make_row("b", reward=0.4))
    assert training_data_digest(state, REPLAY, replay=ReplaySection()) != before


def test_a_row_that_a_recipe_does_not_train_on_does_not_change_its_digest(state: StateDir) -> None:
    before = training_data_digest(state, REPLAY, replay=ReplaySection())
    write_rows(state, make_row("a"))
    assert training_data_digest(state, REPLAY, replay=ReplaySection()) == before
    assert training_data_digest(state, REPLAY, replay=ReplaySection(threshold=0.3)) == before
    write_rows(state, make_row("a"), make_row("b", reward=0.4))
    assert training_data_digest(state, REPLAY, replay=ReplaySection(threshold=0.3)) != before


def test_verification_changes_the_digest_only_where_it_changes_the_rows_to_train_on(state: StateDir) -> None:
    plain, strict = ReplaySection(), ReplaySection(require_verified=True)

    def digests() -> tuple[str, str]:
        return training_data_digest(state, REPLAY, replay=plain), training_data_digest(state, REPLAY, replay=strict)

    unverified = digests()
    write_verification(state, "b", 1.0)
    assert digests() == unverified, "a row that is no success stays none"
    write_verification(state, "a", 1.0)
    verified = digests()
    assert verified[0] == unverified[0]
    assert verified[1] != unverified[1]
    write_verification(state, "a", 0.0, attempt=1)
    assert digests() == verified, "the best word counts"


def test_lineage_goes_from_a_checkpoint_to_its_base(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    for name, parent in (("base", None), ("sft", "base"), ("phase1", "sft")):
        checkpoint = Checkpoint(
            checkpoint_id=name,
            stage=Stage.BASE,
            parent_id=parent,
            path=f"checkpoints/{name}",
            num_updates=0,
            recipe_digest="",
            data_digest="",
            weights_digest="",
        )
        (state.checkpoints / name).mkdir(parents=True)
        (state.checkpoints / name / CARD).write_text(json.dumps(checkpoint_card(checkpoint)))
    assert checkpoint_lineage(state, "phase1") == (Ancestor("phase1"), Ancestor("sft"), Ancestor("base"))
    assert checkpoint_lineage(state, "unknown") == (Ancestor("unknown"),)
    assert checkpoint_lineage(state, None) == ()
