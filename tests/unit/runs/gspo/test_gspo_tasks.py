"""Which tasks GSPO runs episodes of."""

import json
from pathlib import Path

import pytest
from export_samples import task_row
from replay_samples import make_row, write_rows

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.checkpoints.ids import gspo_data_digest
from osworld_pipeline.runs.gspo.job import load_gspo_tasks
from osworld_pipeline.tables.owned import write_table

NAMES = "abcdefgh"
LEFT = "rollout.tasks=left_by_sft"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    configs = {name: {"id": name, "instruction": "Do it.", "evaluator": {"func": "infeasible"}} for name in NAMES}
    write_table(state, "train_tasks", [task_row(name, task_config=json.dumps(configs[name])) for name in NAMES])
    return write_rows(state, *(make_row(f"{name}-{part}", f"{name}_chunk{part}") for name in NAMES for part in "12"))


def recipe_of(*settings: str) -> Recipe:
    return load_recipe("qwen3vl_4b", settings=settings)


def names(state: StateDir, recipe: Recipe) -> str:
    return "".join(task.task_id for task in load_gspo_tasks(state, recipe))


def test_gspo_runs_all_tasks_by_default(state: StateDir) -> None:
    assert names(state, recipe_of("sft.task_share=0.5")) == NAMES


def test_gspo_can_run_the_tasks_that_sft_left_with_any_seed_of_its_share(state: StateDir) -> None:
    drawn = {names(state, recipe_of(LEFT, "sft.task_share=0.5", f"sft.seed={seed}")) for seed in range(6)}
    assert {len(left) for left in drawn} == {4}
    assert len(drawn) > 1


def test_a_demonstration_that_sft_does_not_take_does_not_exclude_its_task(state: StateDir) -> None:
    rewards = {name: 0.2 if name in "ab" else 1.0 for name in NAMES}
    write_rows(state, *(make_row(name, name, reward=reward) for name, reward in rewards.items()))
    # SFT chooses three of the six tasks with a success, and five tasks are left.
    left = names(state, recipe_of(LEFT, "sft.task_share=0.5"))
    assert len(left) == 5
    assert {"a", "b"} < set(left)


def test_if_sft_leaves_no_tasks_the_error_says_what_to_change(state: StateDir) -> None:
    with pytest.raises(TableError, match=r"8 training tasks, which leaves none for GSPO: set sft\.task_share below 1"):
        load_gspo_tasks(state, recipe_of(LEFT))


def test_the_share_of_sft_is_in_the_data_digest_only_if_it_decides_the_tasks(state: StateDir) -> None:
    def digests(*settings: str) -> int:
        shares = (0.25, 0.5)
        return len({gspo_data_digest(state, recipe_of(*settings, f"sft.task_share={share}")) for share in shares})

    assert digests() == 1
    assert digests(LEFT) == 2
