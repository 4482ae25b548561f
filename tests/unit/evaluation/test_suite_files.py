"""Suites of an evaluation: the recipe's own, OSWorld's lists, and files of the user's."""

import json
from pathlib import Path
from typing import Any

import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.evaluation.suite_files import (
    DOMAINS,
    HELDOUT,
    OSWORLD_SUITES,
    read_osworld_suite,
    read_suite_file,
    suite_names,
)
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.evaluate.plan import TaskChoice, load_suite, load_tasks, plan_evaluation


def task(task_id: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": task_id,
        "instruction": "Do it.",
        "evaluator": {"func": "infeasible"},
        "related_apps": ["os"],
    } | changes


def write(path: Path, document: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def test_list_of_tasks_is_a_suite_and_so_is_an_object_that_names_files(tmp_path: Path) -> None:
    write(tmp_path / "tasks" / "b.json", task("b"))
    listed = read_suite_file(write(tmp_path / "one.json", [task("a"), task("b")]))
    named = read_suite_file(write(tmp_path / "two.json", {"tasks": [task("a"), "tasks/b.json"]}))
    assert (listed.name, [one.task_id for one in listed.tasks]) == ("one", ["a", "b"])
    assert named.digest == listed.digest


def scored(**changes: Any) -> dict[str, Any]:
    evaluator = {
        "func": "check_include_exclude",
        "result": {"type": "vm_command_line", "command": "cat a"},
        "expected": {"type": "rule", "rules": {"include": ["milk"]}},
    }
    return {**task("a"), "evaluator": {**evaluator, **changes}}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            scored(func="check_includes"),
            "metric 'check_includes', which does not exist: did you mean check_include_exclude",
        ),
        (scored(result={"type": "vm_command", "command": "a"}), "getter 'vm_command'.*did you mean vm_command_line"),
        (scored(expected={"type": "rule", "rules": {"contains": ["milk"]}}), "no rule 'contains'; .* include, exclude"),
        (scored(expected={"type": "rule", "rules": {}}), "has no rule, so every desktop would fulfil it"),
        (scored(postconfig=[{"type": "wait"}]), "set-up verb 'wait', which does not exist: there are .*sleep"),
        ({**scored(), "config": [{"type": "wait", "parameters": {"seconds": 1}}]}, "set-up verb 'wait'"),
        ({**scored(), "config": [{"type": "sleep", "parameters": {"second": 1}}]}, "no parameter 'second'; .* seconds"),
    ],
)
def test_a_task_that_cannot_be_set_up_or_scored_is_refused_when_the_suite_is_loaded(
    tmp_path: Path, wrong: dict[str, Any], sentence: str
) -> None:
    write(tmp_path / "tasks" / "wrong.json", wrong)
    assert read_suite_file(write(tmp_path / "good.json", [scored()])).tasks
    with pytest.raises(DatasetError, match=rf"bad.json, task 2: task a.*{sentence}"):
        read_suite_file(write(tmp_path / "bad.json", [task("b"), wrong]))
    with pytest.raises(DatasetError, match=rf"wrong.json: task a.*{sentence}"):
        read_suite_file(write(tmp_path / "named.json", ["tasks/wrong.json"]))


def test_a_task_that_needs_osworlds_graders_is_accepted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = {"type": "vm_file", "path": "/a", "dest": "a"}
    tables = scored(func="compare_table", result=file, expected={**file, "type": "cloud_file"})
    assert read_suite_file(write(tmp_path / "mine.json", [tables])).tasks
    assert "suite mine uses features of OSWorld's desktop-env: metric compare_table (task a)" in caplog.text
    assert "getter cloud_file" in caplog.text
    caplog.clear()
    assert read_suite_file(write(tmp_path / "ours.json", [scored()])).tasks
    assert not caplog.text


def test_digest_depends_on_every_task_and_not_on_their_order(tmp_path: Path) -> None:
    there = read_suite_file(write(tmp_path / "a.json", [task("a"), task("b")]))
    back = read_suite_file(write(tmp_path / "b.json", [task("b"), task("a")]))
    other = read_suite_file(write(tmp_path / "c.json", [task("a"), {**task("b"), "instruction": "Do not."}]))
    assert there.digest == back.digest != other.digest


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([], "no list of tasks"),
        ({"tasks": "all"}, "no list of tasks"),
        ([7], r"bad.json, task 1 is not a task"),
        ([{"id": "a"}], "task 1: task a has no instruction"),
        ([task("a"), task("a")], "suite bad: task a occurs twice"),
        (["gone.json"], r"there is no .*gone.json: a task of the suite is missing"),
    ],
)
def test_a_file_that_is_not_a_suite_is_refused_with_the_place_of_the_error(
    tmp_path: Path, document: Any, sentence: str
) -> None:
    with pytest.raises(DatasetError, match=sentence):
        read_suite_file(write(tmp_path / "bad.json", document))


@pytest.mark.parametrize("name", ["heldout", "osworld-os", "a|b"])
def test_a_name_that_is_taken_or_is_not_a_partition_key_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / f"{name}.json", [task("a")])
    with pytest.raises(DatasetError, match="name"):
        suite_names(tmp_path)


def test_suites_of_the_user_are_listed_next_to_the_built_in_ones(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert suite_names(state.suites) == (HELDOUT, *OSWORLD_SUITES)
    write(state.suites / "mine.json", [task("a")])
    assert suite_names(state.suites)[-1] == "mine"
    assert load_suite(state, load_recipe("smoke"), "mine").tasks[0].task_id == "a"
    with pytest.raises(DatasetError, match="no suite 'yours': there are heldout, "):
        load_suite(state, load_recipe("smoke"), "yours")


def test_the_evaluation_of_another_suite_has_another_key(tmp_path: Path) -> None:
    recipe = load_recipe("smoke")
    suite = read_suite_file(write(tmp_path / "mine.json", [task("a")]))
    own, other = plan_evaluation(recipe, "sft-1"), plan_evaluation(recipe, "sft-1", suite=suite)
    assert own.key != other.key
    assert [planned[0].task_id for planned in other.episodes.values()] == ["a"]


def test_tasks_of_two_domains_with_one_id_are_two_tasks_of_an_evaluation(tmp_path: Path) -> None:
    recipe, twins = load_recipe("smoke"), [task("a", related_apps=["chrome"]), task("a", related_apps=["vlc"])]
    suite = read_suite_file(write(tmp_path / "mine.json", [*twins, task("b")]))
    plan = plan_evaluation(recipe, "sft-1", suite=suite)
    names = [name.removeprefix(f"{plan.stage_key}-") for name in plan.episodes]
    assert names == ["chrome_a-s0", "vlc_a-s0", "b-s0"]
    seeds = [planned.sampling.seed for _, planned in plan.episodes.values()]
    assert len(set(seeds)) == 3


def test_without_a_checkout_of_osworld_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="git clone"):
        read_osworld_suite("osworld-test_small", tmp_path)


def test_every_published_list_is_a_suite(real_data: Path) -> None:
    suites = {name: read_osworld_suite(name, real_data / "osworld") for name in OSWORLD_SUITES}
    assert len(suites["osworld-test_all"].tasks) == 369
    assert sum(len(suites[f"osworld-{domain}"].tasks) for domain in DOMAINS) == 369
    assert len(suites["osworld-test_small"].tasks) == 39
    assert {one.domain for one in suites["osworld-os"].tasks} == {"os"}
    assert suites["osworld-windows"].tasks


def test_the_first_tasks_of_a_suite_are_a_separate_suite_and_all_tasks_are_the_suite_itself(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.json", [task("a"), task("b"), task("c")])
    recipe, state = load_recipe("smoke"), StateDir(tmp_path)
    whole = load_tasks(state, recipe, TaskChoice(tasks_file=str(file)))
    part = load_tasks(state, recipe, TaskChoice(tasks_file=str(file), max_tasks=2))
    assert (part.name, [one.task_id for one in part.tasks]) == ("mine-first-2", ["a", "b"])
    assert part.digest != whole.digest
    assert load_tasks(state, recipe, TaskChoice(tasks_file=str(file), max_tasks=3)) == whole
    assert load_tasks(state, recipe, TaskChoice()) == load_suite(state, recipe, HELDOUT)
