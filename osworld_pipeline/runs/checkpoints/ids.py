"""Ids of stages: a checkpoint's id is a digest of all its inputs, so a rerun finds existing results."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from osworld_pipeline.domain.checkpoint import Ancestor, Checkpoint, Stage
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.replay import TrainedRow, base_task_id
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.suites import Suite, build_suite
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.learned import learned_by, learned_keys
from osworld_pipeline.recipes.schema import ReplaySection, SftSection
from osworld_pipeline.tables.builds import one_build
from osworld_pipeline.tables.owned import read_table
from osworld_pipeline.tables.replay.rows import read_replay_columns, verified_rewards
from osworld_pipeline.training.demonstrations import choose_demonstrations

CARD = "checkpoint.json"

DIGEST_LENGTH = 12

EVALUATION_TOP_P = 1.0
"""Evaluations sample from the full distribution."""

REPLAY_COLUMNS = ("row_id", "original_task_id", "quality_rank", "reward", "images")
"""Columns of a replay row that enter the digest of the training data; `row_id` is a digest of task and turns."""


def stage_params(stage: Stage, recipe: Recipe) -> dict[str, Any]:
    """The sections of `recipe` that determine the result of `stage`; also its MLflow parameters."""
    return learned_by(stage, recipe.model_dump(mode="json"))


def stage_recipe_digest(stage: Stage, recipe: Recipe) -> str:
    """Digest of the parts of the recipe that determine `stage`."""
    return digest_json(stage_params(stage, recipe))


def stage_checkpoint_id(stage: Stage, recipe: Recipe, *, parent_id: str | None, data_digest: str) -> str:
    """`<stage>-<12 hex>`."""
    digest = digest_json({"params": stage_params(stage, recipe), "parent": parent_id, "data": data_digest})
    return f"{stage}-{digest[:DIGEST_LENGTH]}"


def evaluation_key(recipe: Recipe, *, suite_digest: str) -> str:
    """Digest of all recipe settings that make two evaluations comparable, without the checkpoint. Desktops and graders
    are recorded by the episodes; the view `evals` has them as `desktops`."""
    limits = {
        "episode_timeout_s": recipe.gspo.episode_timeout_s,
        "turn_timeout_s": recipe.gspo.turn_timeout_s,
        "request_timeout_s": recipe.env_request_timeout_s,
        "max_env_attempts": recipe.gspo.max_env_attempts,
    }
    dumped = recipe.model_dump(mode="json")
    parts = {
        "evaluation": learned_keys("evaluation", dumped["evaluation"]),
        "agent": dumped["agent"],
        "desktop": learned_keys("desktop", dumped["desktop"]),
        "success_threshold": recipe.reward.success_threshold,
        "suite": suite_digest,
        "limits": limits,
        "top_p": EVALUATION_TOP_P,
    }
    if recipe.evaluation.temperature > 0:
        # Recorded evaluations without this part used the same sampling seed for every task.
        parts |= {"draws": "by task"}
    return digest_json(parts)[:DIGEST_LENGTH]


def recipe_suite(recipe: Recipe) -> Suite:
    """The task suite of a recipe, for its screen."""
    suite = recipe.suite
    return build_suite(
        suite.name,
        seed=suite.seed,
        families=suite.families,
        num_train=suite.num_train,
        num_heldout=suite.num_heldout,
        screen=(recipe.desktop.screen_width, recipe.desktop.screen_height),
    )


def flywheel_data_digest(state: StateDir, recipe: Recipe) -> str:
    """Digest of the data that a flywheel round learns from, apart from its rollouts."""
    tables = ["replay_buffer", "train_tasks"] if recipe.flywheel.with_demonstrations else ["train_tasks"]
    return training_data_digest(state, tables, replay=recipe.replay, sft=recipe.sft)


def gspo_data_digest(state: StateDir, recipe: Recipe) -> str:
    """Digest of the training data of both phases."""
    digest = training_data_digest(state, ["replay_buffer", "train_tasks"], replay=recipe.replay)
    if recipe.rollout.tasks == "all":
        return digest
    return digest_json([digest, sorted(imitated_tasks(state, recipe))])


def imitated_tasks(state: StateDir, recipe: Recipe) -> set[str]:
    """The base ids of the tasks whose demonstrations SFT uses."""
    with one_build(state):
        return {base_task_id(row["original_task_id"]) for row in _chosen_rows(state, recipe.replay, recipe.sft)}


def training_data_digest(
    state: StateDir, tables: Sequence[str], *, replay: ReplaySection | None = None, sft: SftSection | None = None
) -> str:
    """Digest of the content of the named tables, independent of the order of their rows.

    With the `replay` section of a recipe, only the trainable part of the replay buffer counts, so a new verification
    changes the digest only if it changes the training data. With its `sft` section, only the demonstrations that SFT
    selects count.
    """
    tasks = ("task_id", "task_config")
    content: dict[str, Any] = {}
    with one_build(state):
        for name in tables:
            if name == "replay_buffer":
                rows = _chosen_rows(state, replay, sft)
                content[name] = sorted(tuple(str(row[column]) for column in REPLAY_COLUMNS) for row in rows)
            else:
                content[name] = sorted(zip(*_columns(state, name, tasks), strict=True))
    return digest_json(content)


def checkpoint_lineage(state: StateDir, checkpoint_id: str | None) -> tuple[Ancestor, ...]:
    """The stages that made the checkpoint and its ancestors, nearest first."""
    lineage: list[str] = []
    while checkpoint_id is not None and checkpoint_id not in lineage:
        lineage.append(checkpoint_id)
        checkpoint = read_checkpoint(state, checkpoint_id)
        checkpoint_id = checkpoint.parent_id if checkpoint else None
    return tuple(Ancestor.parse(name) for name in lineage)


def read_checkpoint(state: StateDir, checkpoint_id: str) -> Checkpoint | None:
    """The finished checkpoint of that id; None if its stage has not ended."""
    card = state.checkpoints / checkpoint_id / CARD
    if not card.is_file():
        return None
    fields = json.loads(card.read_text())
    read = {
        "stage": Stage(fields["stage"]),
        "row_ids": tuple(fields.get("row_ids", ())),
        "sources": tuple(TrainedRow(**one) for one in fields.get("sources", ())),
    }
    return Checkpoint(**{**fields, **read})


def checkpoint_card(checkpoint: Checkpoint) -> dict[str, Any]:
    """The content of `checkpoint.json` next to the weights."""
    return {**asdict(checkpoint), "stage": str(checkpoint.stage)}


def _chosen_rows(state: StateDir, section: ReplaySection | None, sft: SftSection | None) -> list[dict[str, Any]]:
    rows = [row for batch in read_replay_columns(state, REPLAY_COLUMNS) for row in batch.to_pylist()]
    if section is not None:
        verified = verified_rewards(state) if section.require_verified else None
        rows = [
            row
            for row in rows
            if row["reward"] >= section.threshold
            and (verified is None or verified.get(row["row_id"], -1.0) >= section.threshold)
        ]
    if sft is not None:
        named = [(row["row_id"], row["original_task_id"]) for row in rows]
        chosen = choose_demonstrations(named, sft, domains=task_domains(state))
        rows = [row for row in rows if row["row_id"] in chosen]
    return rows


def task_domains(state: StateDir) -> dict[str, str]:
    """Domains of the training tasks, by task id."""
    return dict(zip(*_columns(state, "train_tasks", ("task_id", "domain")), strict=True))


def _columns(state: StateDir, table: str, names: Sequence[str]) -> list[list[str]]:
    columns = read_table(state, table).select(list(names))
    return [[str(value) for value in columns.column(name).to_pylist()] for name in names]
