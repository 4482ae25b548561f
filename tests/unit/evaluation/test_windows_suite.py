"""The suites with Windows programs: four levels, own instances, checkers that this server has, and oracles."""

import itertools
import json
import string

import pytest

from env_server.providers.qemu.qmp_input import qcodes_of
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import StepSignals
from osworld_pipeline.evaluation.suites import SUITES, Suite, SuiteTask, build_suite, needs_wine
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.rollout.reward import shape_reward
from osworld_pipeline.task_schema.reading import check_verbs, read_grader

NAMES = ("windows_basics", "wine_basics")
LEVELS = {f"windows_level{level}" for level in range(1, 5)}


def suite(name: str = "wine_basics", *, num_train: int = 4, num_heldout: int = 1) -> Suite:
    return build_suite(name, seed=0, num_train=num_train, num_heldout=num_heldout, screen=(640, 400))


def all_tasks(name: str) -> list[SuiteTask]:
    built = suite(name)
    return [*built.train, *built.heldout]


@pytest.mark.parametrize("name", NAMES)
def test_each_windows_suite_has_four_levels_and_its_checkers(name: str) -> None:
    tasks = all_tasks(name)
    assert {item.task.domain for item in tasks} == LEVELS
    used = {func for item in tasks for func in _listed(item.task.config["evaluator"]["func"])}
    five = {"exact_match", "names_listed", "non_empty", "has_all", "date_format"}
    # Wine has no PowerShell, and its command interpreter no date in a fixed form.
    assert used == {f"windows_{checker}" for checker in (five if name == "windows_basics" else five - {"date_format"})}


def _listed(value: object) -> list[str]:
    return value if isinstance(value, list) else [str(value)]


@pytest.mark.parametrize("name", NAMES)
def test_the_env_server_has_every_verb_and_metric(name: str) -> None:
    for item in all_tasks(name):
        config = json.loads(json.dumps(item.task.config))
        assert read_grader(item.task.task_id, config["evaluator"]).checks
        check_verbs(item.task.task_id, config["config"])


@pytest.mark.parametrize("name", NAMES)
def test_no_expected_text_is_blank(name: str) -> None:
    for item in all_tasks(name):
        expected = item.task.config["evaluator"]["expected"]
        for one in expected if isinstance(expected, list) else [expected]:
            texts = one["rules"].get("expected", "something")
            assert all(text.strip() for text in ([texts] if isinstance(texts, str) else texts))


def test_windows_needs_no_set_up_and_wine_only_needs_its_start() -> None:
    assert not any(item.task.config["config"] for item in all_tasks("windows_basics"))
    assert all(len(item.task.config["config"]) == 2 for item in all_tasks("wine_basics"))
    assert [needs_wine(name) for name in SUITES] == [False, False, False, True]


def test_only_powershell_is_missing_on_wine() -> None:
    assert set(SUITES["windows_basics"]) - set(SUITES["wine_basics"]) == {"powershell_date", "powershell_content"}
    assert not set(SUITES["wine_basics"]) - set(SUITES["windows_basics"])


@pytest.mark.parametrize("name", NAMES)
def test_no_heldout_instruction_occurs_in_training(name: str) -> None:
    built = build_suite(
        name, seed=0, families=["notepad_named", "cmd_echo"], num_train=40, num_heldout=10, screen=(9, 9)
    )
    trained = {item.task.instruction for item in built.train}
    assert len(trained) == 80
    assert not trained & {item.task.instruction for item in built.heldout}
    assert {item.task.task_id.partition("-basics")[0] for item in built.train} == {name.removesuffix("_basics")}


@pytest.mark.parametrize("name", NAMES)
def test_every_oracle_can_be_written_as_keys_only_and_typed_on_an_emulated_keyboard(name: str) -> None:
    dialect = load_dialect("sendkey")
    for item in all_tasks(name):
        for step in item.oracle:
            turn = dialect.parse_strict(dialect.format(step.description, step.arguments))
            assert turn.arguments == step.arguments
            for character in step.arguments.get("text", ""):
                assert qcodes_of(character)
        assert item.oracle[-1].arguments == {"action": "terminate", "status": "success"}


def test_instructions_have_only_printable_ascii_characters() -> None:
    for item in all_tasks("windows_basics"):
        assert set(item.task.instruction) <= set(string.printable)


# The reward of the recipe


def good_step() -> StepSignals:
    return StepSignals(
        action_type="type", coordinate=None, action_parsed=True, action_executed=True, fallback_used=False,
        a11y_grounded=True, screen_changed=True, a11y_changed=True, terminal_changed=True,
    )  # fmt: skip


def shaped(task: float, num_good_steps: int) -> float:
    section = load_recipe("windows_smoke").reward
    steps = [good_step()] * num_good_steps
    return shape_reward(task, steps, max_steps=10, section=section, has_a11y_tree=False).shaped


def test_format_reward_is_at_most_half_of_the_smallest_partial_score_and_keeps_the_order_of_scores() -> None:
    scores = [0.0, 0.1, 0.2, 0.5, 1.0]
    for score in scores:
        assert score <= shaped(score, 0) <= score + 0.05
        assert score <= shaped(score, 4) <= score + 0.05
    for low, high in itertools.pairwise(scores):
        assert shaped(low, 4) < shaped(high, 0)
    assert shaped(1.0, 4) == shaped(1.0, 0) == 1.0
    assert shaped(0.0, 2) > 0.0, "it is an option that does something"
    assert shaped(0.5, 4) == shaped(0.5, 4), "nothing is drawn"
