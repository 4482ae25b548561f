"""The result file of an evaluation has Slime-OSWorld's fields, and a fault is not a failure."""

import json

from episode_samples import make_episode
from eval_samples import eval_rows

from osworld_pipeline.domain.episode import Outcome, Reward
from osworld_pipeline.domain.task import Task
from osworld_pipeline.evaluation.result_file import result_document
from osworld_pipeline.evaluation.scores import summarise
from osworld_pipeline.evaluation.suite_files import EvalSuite

SPEC = {"checkpoint", "tasks", "max_turns", "seeds", "success_rate", "results"}
SPEC_OF_A_RESULT = {"task_id", "seed", "success", "turns", "process_signals"}
ENDINGS = {"s": Outcome.SUCCESS, "f": Outcome.FAILURE, "e": Outcome.ENV_FAULT}


def document(played: dict[str, str], **changes) -> dict:
    """The result document of these tasks, each with one letter per seed. `changes` apply to the scored rows."""
    config = {"instruction": "Do it.", "evaluator": {"func": "infeasible"}}
    suite = EvalSuite(name="mine", tasks=tuple(Task.from_config({"id": name, **config}) for name in played), digest="d")
    episodes = [
        make_episode(
            f"{name}-{seed}",
            task_id=name,
            seed=seed,
            outcome=ENDINGS[letter],
            reward=Reward(task=float(letter == "s")) if letter != "e" else None,
            error="the desktop died" if letter == "e" else None,
        )
        for name, letters in reversed(played.items())
        for seed, letter in enumerate(letters)
    ]
    score = summarise(eval_rows(played, **changes))
    return result_document("c", suite, episodes, score, max_turns=12, seeds=(0, 1), settings={"temperature": 0.0})


def test_result_file_has_the_fields_that_its_readers_expect() -> None:
    written = json.loads(json.dumps(document({"b": "sf", "a": "ff"})))
    assert set(written) >= SPEC
    assert (written["checkpoint"], written["tasks"], written["max_turns"]) == ("c", ["b", "a"], 12)
    assert (written["seeds"], written["success_rate"]) == ([0, 1], 0.25)
    assert all(set(row) >= SPEC_OF_A_RESULT for row in written["results"])
    assert [(row["task_id"], row["seed"], row["success"], row["turns"]) for row in written["results"]] == [
        ("b", 0, True, 2), ("b", 1, False, 2), ("a", 0, False, 2), ("a", 1, False, 2),
    ]  # fmt: skip
    assert written["results"][0]["process_signals"][0]["action_type"] == "type"


def test_fault_is_neither_success_nor_failure_and_says_what_happened() -> None:
    written = document({"a": "se", "b": "fe"})
    fault = written["results"][1]
    assert (fault["success"], fault["reward"], fault["outcome"]) == (None, None, "env_fault")
    assert fault["error"] == "the desktop died"
    assert (written["success_rate"], written["strict_success_rate"]) == (0.5, 0.25)
    assert (written["num_valid"], written["num_run"], written["num_faults"]) == (2, 4, 2)


def test_evaluation_without_a_graded_episode_has_no_rate() -> None:
    written = document({"a": "ee"})
    assert (written["success_rate"], written["interval"]) == (None, None)
    assert json.loads(json.dumps(written, allow_nan=False))["num_faults"] == 2


def test_the_result_of_the_parity_probe_is_included_if_there_was_a_probe() -> None:
    probed = {"parity_num_tokens": 56, "parity_mean_diff": 2e-7, "parity_max_diff": 1e-6}
    assert document({"a": "s"}, **probed)["parity"] == {"num_tokens": 56, "mean_diff": 2e-7, "max_diff": 1e-6}
    assert document({"a": "s"})["parity"] is None
