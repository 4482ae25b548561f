"""Which checkpoints belong to an arm, where several arms share the state of a seed."""

from pathlib import Path

import pytest
from checkpoint_samples import make_checkpoint

from benchmarks.bench_learning import SPARSE, SPARSE_ALONE, SPARSE_SFT, STAGES, Arm, _checkpoints
from benchmarks.processes import BenchmarkError
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.checkpoints.ids import stage_recipe_digest
from osworld_pipeline.tables.checkpoints import upsert_checkpoint


def train(state: StateDir, arm: Arm) -> str:
    """Records the checkpoints of the arm; returns the id of the last one."""
    recipe = load_recipe(arm.recipe, settings=arm.settings)
    parent = ""
    for stage in STAGES:
        digest = stage_recipe_digest(stage, recipe)
        made = make_checkpoint(f"{parent}{digest[:8]}", stage, recipe_digest=digest, parent_id=parent or None)
        upsert_checkpoint(state, made)
        parent = made.checkpoint_id
    return parent


def test_arms_that_differ_only_in_sft_have_their_own_phase_2(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    made = {arm.name: train(state, arm) for arm in (SPARSE, SPARSE_SFT, SPARSE_ALONE)}
    assert len(set(made.values())) == 3
    for arm in (SPARSE, SPARSE_SFT, SPARSE_ALONE):
        found = _checkpoints(state, load_recipe(arm.recipe, settings=arm.settings))
        assert found[Stage.GSPO_PHASE2].checkpoint_id == made[arm.name]


def test_an_arm_that_was_not_trained_is_named(tmp_path: Path) -> None:
    train(StateDir(tmp_path), SPARSE)
    with pytest.raises(BenchmarkError, match="has 0 phase 2 checkpoints of this recipe"):
        _checkpoints(StateDir(tmp_path), load_recipe(SPARSE_SFT.recipe, settings=SPARSE_SFT.settings))
