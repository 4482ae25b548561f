"""Grading joins getters and metrics as OSWorld does, on a desktop in memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fake_desktops import FakeDesktop

from env_server.evaluators.episode_cache import EpisodeCache
from env_server.evaluators.grading import grade
from env_server.evaluators.version import GRADER_VERSION
from osworld_pipeline.errors import EvaluatorError, ReplicaError, TamperingError, TaskError
from osworld_pipeline.task_schema.metrics import METRICS
from osworld_pipeline.task_schema.reading import read_grader

YES = {"type": "rule", "rules": {"expected": "yes\n"}}
LIST = {"type": "rule", "rules": {"expected": ["no part of a text"]}}


def command(text: str) -> dict[str, Any]:
    return {"type": "vm_command_line", "command": text, "shell": True}


def desktop_that_says(**outputs: str) -> FakeDesktop:
    desktop = FakeDesktop("d")
    for name, output in outputs.items():
        fields = {"status": "success", "output": output, "error": f"{name} warned", "returncode": 0}
        desktop.commands[name] = (200, fields)
    return desktop


async def score(evaluator: dict[str, Any], desktop: FakeDesktop, last_action: str | None = "DONE") -> float:
    return await grade(
        read_grader("t", evaluator), desktop.guest, EpisodeCache(), last_action=last_action, run_metric=run_here
    )


async def run_here(name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> float:
    return METRICS[name](*arguments, **options)


def single(name: str) -> dict[str, Any]:
    return {"func": "exact_match", "result": command(name), "expected": YES}


def several(conj: str, *names: str) -> dict[str, Any]:
    return {
        "func": ["exact_match"] * len(names),
        "conj": conj,
        "result": [command(name) for name in names],
        "expected": [YES] * len(names),
    }


@pytest.mark.parametrize(("last_action", "reward"), [("FAIL", 1.0), ("DONE", 0.0), ("WAIT", 0.0), (None, 0.0)])
async def test_infeasible_task_scores_1_only_if_the_last_action_gives_up(
    last_action: str | None, reward: float
) -> None:
    for func in ("infeasible", ["infeasible"]):
        assert await score({"func": func}, FakeDesktop("d"), last_action) == reward


async def test_giving_up_on_a_feasible_task_scores_0() -> None:
    desktop = desktop_that_says(a="yes\n")
    assert await score(single("a"), desktop, "DONE") == 1.0
    assert await score(single("a"), desktop, "FAIL") == 0.0
    assert await score(single("a"), desktop, None) == 1.0


@pytest.mark.parametrize(
    ("conj", "outputs", "reward"),
    [
        ("and", ("yes\n", "yes\n"), 1.0),
        ("and", ("yes\n", "no\n"), 0.0),
        ("or", ("no\n", "yes\n"), 1.0),
        ("or", ("no\n", "no\n"), 0.0),
    ],
)
async def test_scores_of_a_list_of_metrics_are_joined_by_its_conjunction(
    conj: str, outputs: tuple[str, str], reward: float
) -> None:
    desktop = desktop_that_says(a=outputs[0], b=outputs[1])
    assert await score(several(conj, "a", "b"), desktop) == reward


async def test_conjunction_of_partial_scores_is_their_mean_and_disjunction_their_greatest() -> None:
    desktop = desktop_that_says(a="ab", b="abcd")
    evaluator = {
        "func": ["fuzzy_match", "fuzzy_match"],
        "result": [command("a"), command("b")],
        "expected": [{"type": "rule", "rules": {"expected": text}} for text in ("ax", "abcx")],
    }
    # 2 * 1 / 4 and 2 * 3 / 8
    assert await score(evaluator, desktop) == pytest.approx((0.5 + 0.75) / 2)
    assert await score({**evaluator, "conj": "or"}, desktop) == pytest.approx(0.75)


async def test_conjunction_stops_at_the_first_0() -> None:
    desktop = desktop_that_says(a="no\n", b="yes\n")
    assert await score(several("and", "a", "b"), desktop) == 0.0
    assert desktop.executed == ["a"]


async def test_command_that_cannot_run_scores_0_as_in_osworld() -> None:
    desktop = FakeDesktop("d")
    desktop.commands["a"] = (500, {"status": "error", "message": "no such program"})
    assert await score(single("a"), desktop) == 0.0


async def test_error_output_has_its_own_getter() -> None:
    evaluator = {
        "func": "check_include_exclude",
        "result": {"type": "vm_command_error", "command": "a"},
        "expected": {"type": "rule", "rules": {"include": ["a warned"]}},
    }
    assert await score(evaluator, desktop_that_says(a="")) == 1.0


async def test_missing_result_file_scores_0_and_missing_expected_file_is_a_fault() -> None:
    evaluator = {
        "func": "compare_text_file",
        "result": {"type": "vm_file", "path": "/r", "dest": "r"},
        "expected": {"type": "vm_file", "path": "/e", "dest": "e"},
        "options": {"ignore_case": True},
    }
    desktop = FakeDesktop("d")
    desktop.files["/e"] = b"YES"
    assert await score(evaluator, desktop) == 0.0
    desktop.files["/r"] = b"yes"
    assert await score(evaluator, desktop) == 1.0
    del desktop.files["/e"]
    with pytest.raises(EvaluatorError, match="compare_text_file crashed"):
        await score(evaluator, desktop)


async def test_several_files_are_given_by_position() -> None:
    grader_config = {"type": "vm_file", "multi": True, "path": ["/a", "/b"], "dest": ["a", "b"], "gives": [1]}
    evaluator = {
        "func": "file_contains", "result": grader_config, "expected": {"type": "rule", "rules": {"expected": ["x"]}},
    }  # fmt: skip
    desktop = FakeDesktop("d")
    desktop.files.update({"/a": b"no", "/b": b"x"})
    assert await score(evaluator, desktop) == 1.0


async def test_cache_file_that_no_set_up_verb_stored_is_a_fault() -> None:
    evaluator = {
        "func": "file_contains",
        "result": {"type": "cache_file", "path": "out"},
        "expected": {"type": "rule", "rules": {"expected": ["x"]}},
    }
    with pytest.raises(EvaluatorError, match="no set-up verb stored"):
        await score(evaluator, FakeDesktop("d"))
    cache = EpisodeCache()
    cache.put("out", b"x")
    graded = grade(read_grader("t", evaluator), FakeDesktop("d").guest, cache, last_action=None, run_metric=run_here)
    assert await graded == 1.0


@pytest.mark.parametrize(
    "evaluator",
    [
        {"func": "check_text_enlarged", "result": command("a")},
        {"func": "is_in_list", "result": command("a"), "expected": LIST},
    ],
)
async def test_crash_of_a_grader_is_a_grader_fault_and_never_a_score(evaluator: dict[str, Any]) -> None:
    with pytest.raises(EvaluatorError):
        await score(evaluator, desktop_that_says(a="yes\n"))


async def test_desktop_that_dies_during_grading_is_not_the_graders_fault() -> None:
    desktop = desktop_that_says(a="yes\n")
    desktop.alive = False
    with pytest.raises(ReplicaError):
        await score(single("a"), desktop)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"func": "no_such_metric"}, "metric 'no_such_metric'"),
        ({"result": {"type": "no_such_getter"}}, "getter 'no_such_getter'"),
        ({"conj": "xor"}, "'xor'"),
        ({"expected": "yes"}, "'expected' is not an object"),
        ({"func": ["exact_match", "exact_match"]}, "2 evaluator functions and 1"),
    ],
)
def test_evaluator_that_this_server_cannot_run_is_refused_with_one_clear_error(
    change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TaskError, match=sentence):
        read_grader("t", {**single("a"), **change})


def test_grader_version_names_semantics_and_sources() -> None:
    semantics, _, digest = GRADER_VERSION.partition("+")
    assert semantics == "osworld-1.0.2"
    assert len(digest) == 12
    assert int(digest, 16) >= 0


@pytest.mark.parametrize("returncode", [-9, 137])
async def test_a_command_killed_in_its_desktop_is_tampering_and_not_a_score(returncode: int) -> None:
    desktop = FakeDesktop("d")
    desktop.commands["a"] = (200, {"status": "success", "output": "", "error": "", "returncode": returncode})
    with pytest.raises(TamperingError, match="was killed"):
        await score(single("a"), desktop)


async def test_a_desktop_that_can_start_no_process_is_a_fault_and_not_a_failure() -> None:
    desktop = FakeDesktop("d")
    desktop.commands["a"] = (503, {"status": "error", "message": "Cannot allocate memory"})
    with pytest.raises(ReplicaError, match="Cannot allocate memory"):
        await score(single("a"), desktop)
