"""What a task may contain: suites and the env server share one declaration, and unknown words are refused by name."""

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import TaskError
from osworld_pipeline.evaluation.suites import SUITES, build_suite
from osworld_pipeline.task_schema.describe import describe
from osworld_pipeline.task_schema.getters import GETTERS
from osworld_pipeline.task_schema.metrics import METRICS
from osworld_pipeline.task_schema.osworld import OSWORLD_GETTERS, OSWORLD_METRICS, OSWORLD_VERBS
from osworld_pipeline.task_schema.reading import check_task, check_verbs, read_grader
from osworld_pipeline.task_schema.spec import KINDS, Verb, collect
from osworld_pipeline.task_schema.verbs import VERBS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "evaluators.md"
COMMAND = {"type": "vm_command_line", "command": "a"}
FILE = {"type": "vm_file", "path": "/a", "dest": "a"}


def rule(**rules: Any) -> dict[str, Any]:
    return {"type": "rule", "rules": rules}


YES = rule(expected="yes")


def command(func: str, **rules: Any) -> dict[str, Any]:
    """An evaluator that compares a command's output with rules."""
    return evaluator(func, COMMAND, rule(**rules))


def file(func: str, **rules: Any) -> dict[str, Any]:
    return evaluator(func, FILE, rule(**rules))


def evaluator(func: str, result: Mapping[str, Any], expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"func": func, "result": result} | ({} if expected is None else {"expected": expected})


def test_names_listed_as_only_osworlds_are_not_among_ours() -> None:
    assert OSWORLD_VERBS.isdisjoint(VERBS)
    assert OSWORLD_GETTERS.isdisjoint(GETTERS)
    assert OSWORLD_METRICS.isdisjoint(METRICS)


def test_declarations_are_complete() -> None:
    for part in (*VERBS.values(), *GETTERS.values(), *METRICS.values()):
        assert part.about.endswith("."), part.name
        for key in part.keys:
            assert key.about, (part.name, key.name)
            assert key.kind in KINDS, (part.name, key.name)


def test_a_keys_name_and_requirement_come_from_the_functions_parameters() -> None:
    assert [(key.name, key.is_required) for key in VERBS["launch"].keys] == [("command", True), ("shell", False)]
    assert [key.name for key in METRICS["check_json"].rules] == ["expect", "unexpect"]
    assert [key.name for key in METRICS["check_json"].options] == ["is_yaml"]


@pytest.mark.parametrize("name", METRICS)
def test_metric_takes_the_sides_that_it_declares_and_rules_by_name(name: str) -> None:
    metric = METRICS[name]
    positional = [
        one for one in inspect.signature(metric.function).parameters.values() if one.kind is not one.KEYWORD_ONLY
    ]
    sides = [side for side in (metric.result, metric.expected) if side is not None]
    assert len(positional) == len([side for side in sides if side != "rules"])
    assert not metric.rules or "rules" in sides


def test_two_parts_of_one_name_are_refused() -> None:
    with pytest.raises(AssertionError, match="one name"):
        collect(Verb, {"a": VERBS["launch"]}, {"b": VERBS["launch"]})


def test_every_example_is_part_of_a_task_that_passes() -> None:
    check_verbs("t", [verb.example for verb in VERBS.values()])
    for metric in METRICS.values():
        assert read_grader("t", metric.example).checks[0].func == metric.name
    fitting = {"text": "fuzzy_match", "file": "file_contains", "size": "literal_match", "tree": "check_moved_jpgs"}
    for getter in GETTERS.values():
        side = "expected" if getter.gives == "rules" else "result"
        example = METRICS[fitting.get(getter.gives, "exact_match")].example
        assert read_grader("t", {**example, side: getter.example}).checks


def test_the_evaluators_page_equals_the_generated_text() -> None:
    assert PAGE.read_text() == describe(), "python -m osworld_pipeline.task_schema.describe > docs/evaluators.md"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (command("check_includes", include=["a"]), "metric 'check_includes'.*mean check_include_ex"),
        (evaluator("exact_match", {"type": "vm_comand_line"}, YES), "getter 'vm_comand_line'.*mean vm_com"),
        (file("compare_table"), "'compare_table', which only OSWorld's .*--grader osworld"),
        (command("check_include_exclude", contains=["a"]), "no rule 'contains'; its rules are inclu"),
        (command("check_include_exclude"), "no rule, so every desktop would .* 'include' and 'exclude'"),
        (command("check_include_exclude", include=[], exclude=[]), "no rule, so every desktop"),
        (command("check_include_exclude", include="milk"), "'include' of .* is invalid; expected: list of texts"),
        (command("check_include_exclude", include=[""]), "'include' of .* is invalid; expected: list of texts"),
        (file("check_list", expect=["("]), "'expect' of check_list is invalid; expected: list of regular expressions"),
        (file("check_list", expected=["a"]), "check_list has no rule 'expected'; .* expect, unexpect"),
        (file("check_csv", expect=[]), "check_csv has no rule"),
        (file("check_json", expect=[{"key": "a", "ref": 1}]), "'expect' of check_json is invalid; expected: list of"),
        (command("check_direct_json_object", expected={}), "'expected' of check_direct_json_object is em"),
        (file("file_contains", expected=[]), "'expected' of file_contains is empty"),
        (command("is_in_list", expected=""), "'expected' of is_in_list is empty"),
        (command("exact_match"), "exact_match needs the rule 'expected'"),
        (evaluator("exact_match", COMMAND, {"type": "rule", "rules": "a"}), "rules of exact_match are not an object"),
        (evaluator("exact_match", COMMAND), "exact_match needs 'expected': a getter that returns rules"),
        (file("exact_match", expected="a"), "the getter vm_file returns a file; .*vm_command_line"),
        (command("check_list", expect=["a"]), "returns a text; use cache_file or vm_file or"),
        (command("is_utc_0", expected="a"), "is_utc_0 has no 'expected'"),
        (evaluator("exact_match", {"type": "vm_command_line"}, YES), "needs the parameter 'command'"),
        (evaluator("exact_match", {**COMMAND, "shel": True}, YES), "no parameter 'shel'; .* command, "),
        ({**METRICS["exact_match"].example, "options": {"nonsense": 1}}, "has no option 'nonsense'; it has no"),
        (
            {**METRICS["literal_match"].example, "options": {"type": "dict"}},
            "'type' of literal_match is invalid; expected: `str`",
        ),
        ({**METRICS["exact_match"].example, "expectd": 1}, "evaluator with 'expectd': did you mean expected"),
    ],
)  # fmt: skip
def test_an_evaluator_that_cannot_be_scored_is_refused_by_name(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        read_grader("t", wrong)


@pytest.mark.parametrize("name", [name for name in METRICS if METRICS[name].rules])
def test_a_misspelt_rule_is_never_scored(name: str) -> None:
    example = json.loads(json.dumps(METRICS[name].example))
    side = "result" if METRICS[name].result == "rules" else "expected"
    rules = example[side]["rules"]
    first = next(iter(rules))
    rules[f"{first}s"] = rules.pop(first)
    with pytest.raises(TaskError, match=f"{name} has no rule '{first}s'; its rules are"):
        read_grader("t", example)


def test_osworlds_own_words_pass_and_are_named_where_the_graders_are_not_known() -> None:
    config = {
        "id": "t", "instruction": "Do it.", "config": [{"type": "login", "parameters": {"platform": "googledrive"}}],
        "evaluator": evaluator("compare_table", {"type": "googledrive_file", "dest": "a"}, FILE),
    }  # fmt: skip
    assert check_task(Task.from_config(config)) == (
        "set-up verb login",
        "metric compare_table",
        "getter googledrive_file",
    )
    wrong = {**config, "evaluator": evaluator("compare_tables", FILE, FILE)}
    with pytest.raises(TaskError, match="metric 'compare_tables', which does not exist: did you mean compare_table"):
        check_task(Task.from_config(wrong))


def test_a_metric_of_ours_is_checked_next_to_a_getter_of_osworlds() -> None:
    config = {
        "id": "t",
        "instruction": "Do it.",
        "evaluator": evaluator("exact_match", {"type": "profile_name"}, rule(a=1)),
    }
    with pytest.raises(TaskError, match="exact_match has no rule 'a'"):
        check_task(Task.from_config(config))


@pytest.mark.parametrize("name", SUITES)
def test_every_built_in_suite_is_made_of_our_own_words(name: str) -> None:
    suite = build_suite(name, seed=0, num_train=2, num_heldout=1, screen=(640, 400))
    for item in (*suite.train, *suite.heldout):
        assert check_task(item.task) == ()


def published(root: Path) -> Iterator[Task]:
    for path in sorted((root / "osworld" / "evaluation_examples").rglob("*.json")):
        document = json.loads(path.read_text())
        if isinstance(document, dict) and "evaluator" in document:
            try:
                yield Task.from_config(document)
            except TaskError:
                continue  # unfinished: it cannot be scored


def test_the_only_refused_osworld_tasks_are_those_that_osworld_itself_cannot_score(real_data: Path) -> None:
    num_ours, num_osworlds, refused = 0, 0, []
    for task in published(real_data):
        try:
            words = check_task(task)
        except TaskError as error:
            refused.append(str(error))
            continue
        num_osworlds += bool(words)
        if not words:
            num_ours += 1
            read_grader(task.task_id, task.config["evaluator"])
    assert num_ours > 70
    assert num_osworlds > 350
    assert [error.split("'")[1] for error in refused] == ["contains_mp4_video", "calc_insensitive_md5"]


NAMES = [*VERBS, *GETTERS, *METRICS, "func", "result", "expected", "type", "rules", "parameters", "conj", "options",
         "include", "command", "path", "dest", "compare_table", "infeasible"]  # fmt: skip
WORDS = st.sampled_from(NAMES) | st.text(max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(NAMES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
SIDES = VALUES | st.fixed_dictionaries(
    {"type": st.sampled_from([*GETTERS])}, optional={"rules": VALUES, "path": VALUES}
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES, st.sampled_from([*METRICS]) | VALUES, SIDES, SIDES, VALUES)
def test_any_task_is_read_or_refused_with_one_sentence(
    verbs: Any, func: Any, result: Any, expected: Any, options: Any
) -> None:
    config = {
        "id": "t", "instruction": "Do it.", "config": verbs,
        "evaluator": {"func": func or "exact_match", "result": result, "expected": expected, "options": options},
    }  # fmt: skip
    try:
        said = list(check_task(Task.from_config(config)))
    except TaskError as error:
        said = [str(error)]
    assert all(sentence.startswith(("task t", "set-up verb ", "getter ", "metric ")) for sentence in said)
