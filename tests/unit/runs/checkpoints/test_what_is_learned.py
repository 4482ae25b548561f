"""Which keys of a recipe are in the id of a checkpoint: those that change what is learned, and not those that only
change how long it takes."""

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from replay_samples import make_row, write_rows

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import family_of_task
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.recipes.keys import sections
from osworld_pipeline.recipes.learned import SECTIONS
from osworld_pipeline.recipes.schema import ReplaySection, SftSection
from osworld_pipeline.recipes.section import NOT_LEARNED
from osworld_pipeline.runs.base.make_base import tokenizer_corpus
from osworld_pipeline.runs.checkpoints.ids import (
    evaluation_key,
    stage_checkpoint_id,
    stage_params,
    training_data_digest,
)
from osworld_pipeline.runs.evaluate.plan import plan_evaluation
from osworld_pipeline.training.demonstrations import choose_demonstrations

RECIPE = load_recipe("smoke")
TRAINED = [stage for stage in Stage if stage not in (Stage.BASE, Stage.EXTERNAL)]
SPEED: dict[str, Any] = {
    "desktop.num_replicas": 9,
    "desktop.server_urls": ["http://desktops.example:8100"],
    "desktop.may_mix_servers": True,
    "desktop.request_timeout_s": 7.0,
    "trainer.max_tokens_per_batch": 65_536,
    "trainer.batching": "packed",
    "trainer.activation_checkpointing": True,
    "trainer.num_processes": 8,
    "trainer.cpu_offload": True,
    "trainer.num_threads": 3,
    "trainer.save_every": 7,
    "trainer.keep_last": 5,
    "trainer.keep_every": 10,
    "sft.save_every": 77,
    "gspo.micro_batch_size": 1,
    "rollout.max_concurrent_episodes": 99,
    "rollout.reported_rewards": 0,
    "rollout.max_held_updates": 9,
    "rollout.held_pause_s": 1.0,
    "flywheel.num_rounds": 5,
    "flywheel.min_gain": 0.5,
    "retraining.min_new_successes": 7,
    "retraining.patience": 7,
    "retraining.max_wall_s": 7.0,
    "retraining.max_episodes": 7,
    "retraining.max_tokens": 7,
}
LEARNED: dict[str, tuple[Any, set[Stage]]] = {
    "trainer.train_vision": (False, set(TRAINED)),
    "rollout.mode": ("asynchronous", {Stage.GSPO_PHASE1, Stage.GSPO_PHASE2}),
    "rollout.tasks": ("left_by_sft", {Stage.GSPO_PHASE1, Stage.GSPO_PHASE2}),
    "rollout.signal": ("shaped", {Stage.GSPO_PHASE1, Stage.GSPO_PHASE2}),
    "rollout.max_fault_share": (0.1, {Stage.GSPO_PHASE1, Stage.GSPO_PHASE2}),
    "rollout.zero_variance": ("top_up", {Stage.GSPO_PHASE1, Stage.GSPO_PHASE2}),
    "sft.task_share": (0.5, {Stage.SFT, Stage.FLYWHEEL}),
    "sft.num_updates": (9, {Stage.SFT}),
    "flywheel.num_updates": (9, {Stage.FLYWHEEL}),
    "flywheel.threshold": (0.9, {Stage.FLYWHEEL}),
    "agent.context_mode": ("window", set(TRAINED)),
    "gspo.algorithm": ("grpo", {Stage.GSPO_PHASE1, Stage.GSPO_PHASE2}),
    "reward.shaping": ("bounded", {Stage.GSPO_PHASE1, Stage.GSPO_PHASE2}),
}


def changed(key: str, value: Any) -> Recipe:
    section, name = key.split(".")
    data = RECIPE.model_dump(mode="json")
    data[section] |= {name: value}
    return Recipe.model_validate(data)


def ids(recipe: Recipe) -> dict[Stage, str]:
    return {stage: stage_checkpoint_id(stage, recipe, parent_id="p", data_digest="d") for stage in Stage}


@pytest.mark.parametrize("key", SPEED)
def test_a_key_that_changes_only_time_or_cost_changes_no_id(key: str) -> None:
    assert ids(changed(key, SPEED[key])) == ids(RECIPE)


@pytest.mark.parametrize("key", LEARNED)
def test_a_key_that_changes_what_is_learned_changes_only_the_ids_of_its_stages(key: str) -> None:
    value, stages = LEARNED[key]
    now = ids(changed(key, value))
    assert {stage for stage, name in ids(RECIPE).items() if now[stage] != name} == stages


def test_every_key_that_is_left_out_of_the_ids_is_tested() -> None:
    left_out = {f"{name}.{key}" for name, section in sections() for key in section.keys_with(NOT_LEARNED)}
    untried = {
        "trainer.context_parallel",  # needs more processes; see the test of ranks
        "replay.verify", "replay.verification_sample", "replay.num_verification_attempts", "replay.import_file",
        "evaluation.suites",
    }  # fmt: skip
    assert left_out - SPEED.keys() == untried
    assert {name for names in SECTIONS.values() for name in names} <= set(RECIPE.model_dump())


def test_the_source_of_a_recipes_values_is_in_no_id() -> None:
    assert ids(load_recipe("smoke", settings=["agent.max_turns=2"])) == ids(RECIPE)
    assert "sources" not in stage_params(Stage.GSPO_PHASE1, RECIPE)


def test_the_success_threshold_is_in_the_key_of_an_evaluation() -> None:
    assert evaluation_key(changed("reward.success_threshold", 0.9), suite_digest="s") != evaluation_key(
        RECIPE, suite_digest="s"
    )
    assert evaluation_key(changed("reward.alpha", 0.9), suite_digest="s") == evaluation_key(RECIPE, suite_digest="s")
    elsewhere = changed("desktop.server_urls", ["http://desktops.example:8100"])
    assert evaluation_key(elsewhere, suite_digest="s") == evaluation_key(RECIPE, suite_digest="s")


LIMITS: dict[str, Any] = {
    "gspo.episode_timeout_s": 7.0,
    "gspo.turn_timeout_s": 7.0,
    "gspo.max_env_attempts": 9,
    "desktop.request_timeout_s": 7.0,
    "agent.max_response_tokens": 9,
    "agent.max_context_tokens": 1024,
    "evaluation.temperature": 0.7,
}


@pytest.mark.parametrize("key", LIMITS)
def test_every_limit_that_ends_an_episode_early_is_in_the_key_of_an_evaluation(key: str) -> None:
    assert evaluation_key(changed(key, LIMITS[key]), suite_digest="s") != evaluation_key(RECIPE, suite_digest="s")


def test_each_task_of_an_evaluation_has_its_own_sampling_seed_and_all_checkpoints_have_the_same() -> None:
    recipe = changed("evaluation.seeds", [0, 1])

    def draws(checkpoint_id: str) -> dict[tuple[str, int], int]:
        episodes = plan_evaluation(recipe, checkpoint_id).episodes.values()
        return {(task.task_id, plan.seed): plan.sampling.seed for task, plan in episodes}

    assert draws("sft-1") == draws("sft-2")
    assert len(set(draws("sft-1").values())) == len(draws("sft-1")) >= 4


READ_BY_THE_TOKENIZER: dict[str, Any] = {
    "agent.dialect": "pyautogui",
    "agent.coordinate_space": "unit",
    "agent.system_prompt": "full",
    "suite.seed": 7,
    "suite.families": ["write_file"],
    "suite.num_train": 3,
    "desktop.screen_width": 640,
}


@pytest.mark.parametrize("key", READ_BY_THE_TOKENIZER)
def test_the_corpus_of_a_tiny_models_tokenizer_is_in_its_id_and_not_in_that_of_a_published_model(key: str) -> None:
    other = changed(key, READ_BY_THE_TOKENIZER[key])
    assert list(tokenizer_corpus(other)) != list(tokenizer_corpus(RECIPE))
    assert ids(other)[Stage.BASE] != ids(RECIPE)[Stage.BASE]
    model = load_recipe("qwen3vl_4b").model
    assert (
        ids(other.model_copy(update={"model": model}))[Stage.BASE]
        == ids(RECIPE.model_copy(update={"model": model}))[Stage.BASE]
    )


def settings(**changes: Any) -> SftSection:
    return RECIPE.sft.model_copy(update=changes)


def chosen(rows: list[tuple[str, str]], *, domains: Mapping[str, str] = {}, **changes: Any) -> Collection[str]:
    return choose_demonstrations(rows, settings(**changes), domains=domains)


def test_demonstrations_of_a_share_of_the_tasks_are_chosen_by_seed_and_stay_when_tasks_are_added() -> None:
    rows = [(f"{task}-{index}", f"{task}_chunk{index}") for task in "abcdefgh" for index in range(3)]
    half = chosen(rows, task_share=0.5)
    assert len(half) == 12
    assert len({row_id[0] for row_id in half}) == 4, "whole tasks, by their base ids"
    assert half == chosen(list(reversed(rows)), task_share=0.5)
    assert any(chosen(rows, task_share=0.5, seed=seed) != half for seed in range(1, 5))
    more = chosen([*rows, ("i-0", "i"), ("j-0", "j")], task_share=0.5)
    assert len({row_id[0] for row_id in half} - {row_id[0] for row_id in more}) <= 2


def test_the_first_demonstrations_of_a_task_by_id_are_chosen_up_to_the_limit() -> None:
    rows = [(f"{task}-{index}", task) for task in "ab" for index in (2, 0, 1)]
    assert chosen(rows, demonstrations_per_task=2) == {"a-0", "a-1", "b-0", "b-1"}
    assert len(chosen(rows, task_share=0.01)) == 3, "one task at least"


@pytest.mark.parametrize("seed", range(5))
def test_a_share_of_the_tasks_is_the_same_share_of_each_family_and_domain(seed: int) -> None:
    sizes = {"wine-basics-write_file": 20, "wine-basics-click_button": 10}
    names = {kind: [f"{kind}-{index:04d}" for index in range(size)] for kind, size in sizes.items()}
    names |= {"chrome": list("abcdefghij"), "": list("vwxyz")}
    domains = dict.fromkeys(names["chrome"], "chrome")
    rows = [(name, name) for family in names.values() for name in family]
    taken = Counter(
        family_of_task(row_id, domains.get(row_id, ""))
        for row_id in chosen(rows, domains=domains, task_share=0.4, seed=seed)
    )
    assert taken == {"write_file": 8, "click_button": 4, "chrome": 4, "": 2}


def test_a_demonstration_that_sft_does_not_choose_changes_no_digest(tmp_path: Path) -> None:
    first_only = settings(demonstrations_per_task=1)
    state = write_rows(StateDir(tmp_path), make_row("a"))

    def digest(sft: SftSection) -> str:
        return training_data_digest(state, ["replay_buffer"], replay=ReplaySection(), sft=sft)

    before, before_all = digest(first_only), digest(settings())
    write_rows(state, make_row("a"), make_row("b"))
    assert digest(first_only) == before
    assert digest(settings()) != before_all
