"""The leaderboard: ranks, which checkpoints are compared, and which scores are never in one table."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from eval_samples import KEY, eval_rows

from osworld_pipeline.evaluation.breakdown import compare_tasks
from osworld_pipeline.evaluation.leaderboard import Leaderboard, build_leaderboard
from osworld_pipeline.evaluation.leaderboard_rows import leaderboard_rows
from osworld_pipeline.evaluation.scores import CheckpointScore, not_ranked_together, summarise

EIGHT = "abcdefgh"


def tasks(letters: str, *, seeds: int = 1) -> dict[str, str]:
    return {task: letter * seeds for task, letter in zip(EIGHT, letters, strict=False)}


def ranks(board: Leaderboard) -> list[tuple[str, int | None]]:
    return [(row.score.checkpoint_id, row.rank) for table in board.tables for row in table.rows]


@pytest.fixture(scope="module")
def board() -> Leaderboard:
    rows = [
        *eval_rows(tasks("ffffffff"), checkpoint="base"),
        *eval_rows(tasks("ssssssse"), checkpoint="sft"),
        *eval_rows(tasks("ssssfff"), checkpoint="gspo"),
        *eval_rows(tasks("ssssfffs"), checkpoint="part"),
    ]
    parents: Mapping[str, str | None] = {"base": None, "sft": "base", "gspo": "sft", "part": "unheard of"}
    planned = {f"eval-{name}-{KEY}": 8 for name in ("base", "sft", "gspo")}
    return build_leaderboard(rows, parents, planned=planned, num_resamples=500)


def test_the_best_checkpoint_comes_first_and_an_incomplete_evaluation_has_no_rank(board: Leaderboard) -> None:
    # gspo lacks a planned episode. The plan of part is unknown.
    assert ranks(board) == [("sft", 1), ("part", 2), ("base", 3), ("gspo", None)]
    missing = [row.score.num_missing for row in board.tables[0].rows]
    assert missing == [0, None, 0, 1]


def test_a_fault_counts_only_in_the_strict_rate(board: Leaderboard) -> None:
    best = board.tables[0].rows[0].score
    assert (best.lenient.value, best.strict.value, best.faults) == (1.0, 7 / 8, {"env_fault": 1})


def test_each_checkpoint_is_compared_with_its_parent_and_with_the_best(board: Leaderboard) -> None:
    rows = {row.score.checkpoint_id: row for row in board.tables[0].rows}
    sft, gspo, part = rows["sft"], rows["gspo"], rows["part"]
    assert sft.versus_best is None
    assert sft.versus_parent is not None
    assert sft.versus_parent.changes.comparison is not None
    assert sft.versus_parent.changes.comparison.is_better
    assert sft.versus_parent.changes.not_compared == ("h",)
    assert gspo.versus_parent is gspo.versus_best
    assert gspo.versus_parent is not None
    assert [change.task_id for change in gspo.versus_parent.changes.regressions] == ["e", "f", "g"]
    assert part.versus_parent is None
    assert part.versus_best is not None


def test_different_settings_are_different_tables() -> None:
    rows = [*eval_rows(["s"], checkpoint="x", key="one"), *eval_rows(["f"], checkpoint="y", key="two")]
    board = build_leaderboard(rows, {"y": "x"}, planned={})
    assert [table.evaluation_key for table in board.tables] == ["one", "two"]
    assert ranks(board) == [("x", 1), ("y", 1)]
    assert board.tables[1].rows[0].versus_parent is None


def test_one_checkpoint_under_two_settings_is_in_both_tables() -> None:
    rows = [*eval_rows(["s", "s"], key="one"), *eval_rows(["s", "f"], key="two")]
    board = build_leaderboard(rows, {}, planned={"eval-c-one": 2, "eval-c-two": 2})
    assert [table.rows[0].score.success_rate for table in board.tables] == [1.0, 0.5]


def test_scores_with_unknown_settings_are_not_compared_with_any_other() -> None:
    rows = [row for name in "xy" for row in eval_rows(["s"], checkpoint=name)]
    unknown = [replace(row, stage_key="") for row in rows]
    board = build_leaderboard(unknown, {"y": "x"}, planned={})
    assert [len(table.rows) for table in board.tables] == [1, 1]
    assert {table.evaluation_key for table in board.tables} == {""}


def test_equal_success_shares_a_rank() -> None:
    rows = [
        row
        for name, letters in {"x": "sf", "z": "fs", "y": "ff", "v": "ee"}.items()
        for row in eval_rows(tasks(letters), checkpoint=name)
    ]
    assert ranks(build_leaderboard(rows, {}, planned={})) == [("x", 1), ("z", 1), ("y", 3), ("v", None)]


def test_seeds_give_pass_at_k_and_pass_hat_k() -> None:
    board = build_leaderboard(eval_rows(["ssss", "ffff", "sfff", "ee"]), {}, planned={})
    row = board.tables[0].rows[0]
    assert row.pass_at_k is not None
    assert row.pass_hat_k is not None
    assert (row.pass_at_1.value, row.pass_at_1.num_tasks) == (1.25 / 3, 3)
    assert (row.pass_at_k.k, row.pass_at_k.value, row.pass_hat_k.value) == (4, 2 / 3, 1 / 3)
    alone = build_leaderboard(eval_rows(["s", "f"]), {}, planned={}).tables[0].rows[0]
    assert (alone.pass_at_k, alone.pass_hat_k) == (None, None)


def test_the_plain_rows_are_json_and_unknown_values_are_null(board: Leaderboard) -> None:
    rows = json.loads(json.dumps(leaderboard_rows(board), allow_nan=False))
    assert [row["checkpoint_id"] for row in rows] == ["sft", "part", "base", "gspo"]
    assert (rows[0]["lenient_success"], rows[0]["strict_n"], rows[0]["outcomes"]) == (
        1.0, 8, {"env_fault": 1, "success": 7},
    )  # fmt: skip
    assert rows[0]["versus_parent"]["is_better"] is True
    assert (rows[0]["cost_per_success"]["response_tokens"], rows[2]["cost_per_success"]) == (None, None)
    nothing = leaderboard_rows(build_leaderboard(eval_rows(["e"]), {}, planned={}))
    assert (nothing[0]["lenient_success"], nothing[0]["mean_reward"], nothing[0]["strict_success"]) == (None, None, 0.0)


OLD, NEW = "aaaa/grader 7", "aaaa/grader 8"


def test_other_desktops_or_graders_give_separate_tables() -> None:
    rows = [
        *eval_rows(tasks("ffff"), checkpoint="base", desktops=NEW),
        *eval_rows(tasks("sfff"), checkpoint="sft", desktops=OLD),
        *eval_rows(tasks("ssff"), checkpoint="gspo", desktops=NEW),
        *eval_rows(tasks("eeee"), checkpoint="broken"),
    ]
    board = build_leaderboard(rows, {"sft": "base", "gspo": "sft"}, planned={}, num_resamples=100)
    assert [table.desktops for table in board.tables] == [NEW, OLD]
    assert ranks(board) == [("gspo", 1), ("base", 2), ("broken", None), ("sft", 1)]
    by_id = {row.score.checkpoint_id: row for table in board.tables for row in table.rows}
    assert by_id["sft"].versus_parent is None
    assert by_id["gspo"].versus_parent is None
    assert {row["desktops"] for row in leaderboard_rows(board)} == {OLD, NEW}


def test_an_evaluation_by_two_graders_has_no_rank() -> None:
    rows = eval_rows(tasks("ssss"), checkpoint="sft", desktops=f"{OLD}, {NEW}")
    board = build_leaderboard(rows, {}, planned={}, num_resamples=100)
    assert ranks(board) == [("sft", None)]


def test_scores_of_two_graders_are_not_compared() -> None:
    sides = [
        eval_rows(tasks("ssss"), checkpoint=name, desktops=desktops) for name, desktops in (("a", OLD), ("b", NEW))
    ]
    with pytest.raises(ValueError, match="on different desktop images or graders cannot be compared"):
        compare_tasks(*sides, num_resamples=100)


def test_the_reason_why_scores_are_not_ranked_together_is_one_sentence() -> None:
    def score(name: str, desktops: str, key: str = KEY) -> CheckpointScore:
        return summarise(eval_rows(tasks("ss"), checkpoint=name, desktops=desktops, key=key))

    assert not_ranked_together([score("a", OLD), score("b", OLD), score("c", "")]) == []
    assert not_ranked_together([score("a", OLD), score("b", NEW)]) == [
        f"not ranked together: other desktop image or grader ({OLD}; {NEW})"
    ]
    assert not_ranked_together([score("a", f"{OLD}, {NEW}")]) == [
        f"a is not ranked: its episodes were graded on {OLD}, {NEW}"
    ]
    (other,) = not_ranked_together([score("a", OLD), score("b", OLD, key="ba9876543210")])
    assert other.startswith("not ranked together: other settings")
