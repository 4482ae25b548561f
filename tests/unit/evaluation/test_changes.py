"""What changed along a training: who is compared with whom, and which families moved."""

from checkpoint_samples import CHAIN, chain_of, make_checkpoint
from eval_samples import eval_rows

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.evaluation.changes import changes_of, compared_with, family_changes
from osworld_pipeline.evaluation.comparison import Verdict

PARENTS = {one.checkpoint_id: one.parent_id for one in chain_of(*CHAIN)}


def names(checkpoint: str, *stages: Stage) -> list[str]:
    shown = chain_of(*stages)
    parents = {one.checkpoint_id: one.parent_id for one in shown}
    (asked,) = [one for one in shown if one.checkpoint_id == checkpoint]
    return [one.checkpoint_id for one in compared_with(asked, shown, parents)]


def test_each_stage_is_compared_with_sft_and_with_the_one_before_it() -> None:
    assert names("base", *CHAIN) == []
    assert names("sft", *CHAIN) == ["base"]
    assert names("gspo_phase1", *CHAIN) == ["sft"]
    assert names("gspo_phase2", *CHAIN) == ["sft", "gspo_phase1"]


def test_a_flywheel_stands_between_sft_and_the_first_phase() -> None:
    with_flywheel = (Stage.BASE, Stage.SFT, Stage.FLYWHEEL, Stage.GSPO_PHASE1, Stage.GSPO_PHASE2)
    assert names("flywheel", *with_flywheel) == ["sft"]
    assert names("gspo_phase1", *with_flywheel) == ["sft", "flywheel"]


def test_an_ancestor_that_is_not_shown_is_passed_over() -> None:
    base, sft, _, second = chain_of(*CHAIN)
    assert [one.checkpoint_id for one in compared_with(second, [base, sft, second], PARENTS)] == ["sft"]
    assert [one.checkpoint_id for one in compared_with(second, [base, second], PARENTS)] == ["base"]


def test_parents_in_a_circle_end() -> None:
    first, second = make_checkpoint("a", parent_id="b"), make_checkpoint("b", parent_id="a")
    assert [one.checkpoint_id for one in compared_with(first, [first, second], {"a": "b", "b": "a"})] == ["b"]


def test_a_change_is_the_paired_difference_over_the_tasks_of_both() -> None:
    shown = chain_of(Stage.BASE, Stage.SFT)
    rows = eval_rows(["ff"] * 7 + ["ee"], checkpoint="base") + eval_rows(["ss"] * 7 + ["ss"], checkpoint="sft")
    (change,) = changes_of(rows, shown, PARENTS)
    assert change.comparison is not None
    assert (change.comparison.difference, change.comparison.num_tasks, change.num_seeds) == (1.0, 7, 2)
    assert change.comparison.verdict is Verdict.BETTER


def test_other_desktops_are_a_reason_and_not_a_difference() -> None:
    rows = eval_rows("f", checkpoint="base", desktops="a") + eval_rows("s", checkpoint="sft", desktops="b")
    (change,) = changes_of(rows, chain_of(Stage.BASE, Stage.SFT), PARENTS)
    assert change.comparison is None
    assert "different desktop images" in change.apart
    assert change.families == ()


def test_families_that_moved_most_come_first_and_faults_do_not_move_them() -> None:
    before = eval_rows({"a": "ff", "b": "fs"}, family="files") + eval_rows({"c": "ss", "d": "fe"}, family="dialogs")
    after = eval_rows({"a": "ss", "b": "fs"}, family="files") + eval_rows({"c": "ss", "d": "ee"}, family="dialogs")
    files, dialogs = family_changes(before, after)
    assert (files.family, files.difference, files.num_tasks) == ("files", 0.5, 2)
    assert (files.before_successes, files.before_n, files.after_successes, files.after_n) == (1, 4, 3, 4)
    assert (dialogs.difference, dialogs.num_tasks) == (0.0, 1), "task d has no valid sample after"
