"""What changed along a training: which checkpoints are compared, which runs are one arm, and which families changed."""

from dataclasses import replace
from typing import Any

import pytest
from checkpoint_samples import CHAIN, chain_of, make_checkpoint, trained_with
from eval_samples import eval_rows

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.evaluation.arms import arms_of
from osworld_pipeline.evaluation.breakdown import family_of
from osworld_pipeline.evaluation.changes import Training, changes_of, family_changes
from osworld_pipeline.evaluation.comparison import Verdict
from osworld_pipeline.evaluation.scores import EvalRow

BASE = make_checkpoint("base", Stage.BASE)


def names(checkpoint: str, *stages: Stage) -> list[str]:
    return Training(chain_of(*stages)).compared_with(checkpoint, list(stages))


def test_each_stage_is_compared_with_sft_and_with_the_one_before_it() -> None:
    assert names("base", *CHAIN) == []
    assert names("sft", *CHAIN) == ["base"]
    assert names("gspo_phase1", *CHAIN) == ["sft"]
    assert names("gspo_phase2", *CHAIN) == ["sft", "gspo_phase1"]


def test_a_flywheel_is_compared_as_a_stage_between_sft_and_the_first_phase() -> None:
    with_flywheel = (Stage.BASE, Stage.SFT, Stage.FLYWHEEL, Stage.GSPO_PHASE1, Stage.GSPO_PHASE2)
    assert names("flywheel", *with_flywheel) == ["sft"]
    assert names("gspo_phase1", *with_flywheel) == ["sft", "flywheel"]


def test_an_ancestor_that_is_not_shown_is_skipped() -> None:
    training = Training(chain_of(*CHAIN))
    assert training.compared_with("gspo_phase2", ["base", "sft", "gspo_phase2"]) == ["sft"]
    assert training.compared_with("gspo_phase2", ["base", "gspo_phase2"]) == ["base"]


def test_a_cycle_of_parents_is_followed_only_once() -> None:
    training = Training([make_checkpoint("a", parent_id="b"), make_checkpoint("b", parent_id="a")])
    assert training.compared_with("a", ["a", "b"]) == ["b"]


def runs_with(*seeds: int, **settings: Any) -> list[Checkpoint]:
    return [trained_with(Stage.SFT, seed, "base", **settings) for seed in seeds]


def test_runs_that_differ_in_seeds_alone_are_one_arm() -> None:
    arms = arms_of([BASE, *runs_with(0, 1, 2)])
    assert len({arms[one.checkpoint_id] for one in runs_with(0, 1, 2)}) == 1


@pytest.mark.parametrize(
    "settings", [{"sft.learning_rate": 1e-4}, {"sft.num_updates": 7}, {"agent.system_prompt": "full"}]
)
def test_a_run_with_other_training_settings_is_another_arm(settings: dict) -> None:
    (one,), (other,) = runs_with(0), runs_with(1, **settings)
    arms = arms_of([BASE, one, other])
    assert arms[one.checkpoint_id] != arms[other.checkpoint_id]


def test_a_run_whose_settings_change_only_its_duration_is_the_same_arm() -> None:
    (one,), (other,) = runs_with(0), runs_with(1, **{"trainer.num_processes": 4, "evaluation.max_turns": 9})
    arms = arms_of([BASE, one, other])
    assert arms[one.checkpoint_id] == arms[other.checkpoint_id]


def test_other_data_and_another_number_of_updates_are_other_arms() -> None:
    (one,) = runs_with(0)
    recipe = trained_with(Stage.SFT, 1, "base").recipe
    others = [
        make_checkpoint("a", parent_id="base", recipe=recipe, data_digest="other"),
        make_checkpoint("b", parent_id="base", recipe=recipe, num_updates=2),
    ]
    arms = arms_of([BASE, one, *others])
    assert len({arms[found.checkpoint_id] for found in (one, *others)}) == 3


@pytest.mark.parametrize(("share", "num_arms"), [(1.0, 2), (0.5, 1)])
def test_demonstrations_that_a_seed_drew_are_part_of_the_same_data(share: float, num_arms: int) -> None:
    runs = [
        replace(run, data_digest=f"drawn by {number}")
        for number, run in enumerate(runs_with(0, 1, **{"sft.task_share": share}))
    ]
    assert len(set(arms_of(runs).values())) == num_arms


def test_arms_differ_if_the_training_settings_of_their_parents_differ() -> None:
    (near,), (far,) = runs_with(0), runs_with(1, **{"sft.learning_rate": 1e-4})
    ends = [trained_with(Stage.GSPO_PHASE1, seed, one.checkpoint_id) for seed, one in enumerate((near, far))]
    arms = arms_of([BASE, near, far, *ends])
    assert arms[ends[0].checkpoint_id] != arms[ends[1].checkpoint_id]


def test_a_card_without_a_recipe_is_an_arm_of_its_own() -> None:
    arms = arms_of(
        [make_checkpoint("a"), make_checkpoint("b"), make_checkpoint("c", recipe={"name": "old", "sft": {}})]
    )
    assert len(set(arms.values())) == 3


def play(letters: str, checkpoint: str, **changes) -> list[EvalRow]:
    """Eight tasks, each with these results of its seeds."""
    return eval_rows([letters] * 8, checkpoint=checkpoint, **changes)


def test_a_change_is_the_paired_difference_over_the_tasks_of_both() -> None:
    rows = eval_rows(["ff"] * 7 + ["ee"], checkpoint="base") + eval_rows(["ss"] * 7 + ["ss"], checkpoint="sft")
    (change,) = changes_of(rows, ["base", "sft"], Training(chain_of(Stage.BASE, Stage.SFT)))
    assert change.effect is not None
    it = change.effect.comparison
    assert (it.difference, it.num_tasks, change.num_seeds) == (1.0, 7, 2)
    assert (change.starts, change.ends, change.stages) == (("base",), ("sft",), ("base", "sft"))
    assert change.effect.words == "one run: better"
    reported = change.fields()
    assert (reported["difference"], reported["num_tasks"], reported["ends"], reported["verdict"]) == (
        1.0,
        7,
        ("sft",),
        "one run: better",
    )
    assert reported["families"][0].family == family_of(rows[0])


def test_runs_of_one_arm_are_one_change_with_a_difference_each() -> None:
    runs = runs_with(0, 1, 2)
    ids = [one.checkpoint_id for one in runs]
    rows = play("fff", "base") + [row for name, letters in zip(ids, ("sss", "ssf", "sss"), strict=True)
                                  for row in play(letters, name)]  # fmt: skip
    (change,) = changes_of(rows, ["base", *ids], Training([BASE, *runs]))
    assert change.effect is not None
    assert change.runs == tuple((("base", name),) for name in ids)
    assert change.effect.run_differences == pytest.approx((1.0, 2 / 3, 1.0))
    assert change.effect.comparison.difference == pytest.approx(8 / 9)
    # Mean 8/9, standard deviation 0.19245: 0.8889 -+ 4.3027 * 0.19245 / sqrt(3) = 0.8889 -+ 0.4781.
    assert change.effect.across_runs == pytest.approx((0.41082, 1.36696), abs=1e-4)
    assert change.effect.words == "effect over 3 runs: better"


def test_each_run_is_compared_with_its_own_start() -> None:
    starts = runs_with(0, 1)
    ends = [trained_with(Stage.GSPO_PHASE1, seed, one.checkpoint_id) for seed, one in enumerate(starts)]
    ids = [one.checkpoint_id for one in (*starts, *ends)]
    rows = [row for name, letters in zip(ids, ("ff", "ss", "ss", "ss"), strict=True) for row in play(letters, name)]
    (change,) = changes_of(rows, ids, Training([BASE, *starts, *ends]))
    assert change.effect is not None
    assert change.runs == (((ids[0], ids[2]),), ((ids[1], ids[3]),))
    assert change.effect.run_differences == (1.0, 0.0)
    assert change.effect.words == "2 runs: no significant difference"


def test_branches_that_share_a_stage_are_one_run() -> None:
    (start,) = runs_with(0)
    first = trained_with(Stage.GSPO_PHASE1, 0, start.checkpoint_id)
    ends = [trained_with(Stage.GSPO_PHASE2, seed, first.checkpoint_id) for seed in (0, 1, 2)]
    ids = [one.checkpoint_id for one in (start, *ends)]
    rows = play("ff", ids[0]) + [row for name in ids[1:] for row in play("ss", name)]
    training = Training([BASE, start, first, *ends])
    (against_sft,) = changes_of(rows, ids, training)
    assert against_sft.effect is not None
    assert against_sft.effect.words == "one run: better", "one phase 1 lies behind all three"
    rows += play("ff", first.checkpoint_id)
    changes = changes_of(rows, [*ids, first.checkpoint_id], training)
    words = {change.stages: change.effect and change.effect.words for change in changes}
    assert words["gspo_phase1", "gspo_phase2"] == "effect over 3 runs: better"


def test_the_largest_spread_among_the_starts_is_used() -> None:
    starts = runs_with(0, 1)
    ends = [trained_with(Stage.GSPO_PHASE1, seed, one.checkpoint_id) for seed, one in enumerate(starts)]
    ids = [one.checkpoint_id for one in (*starts, *ends)]
    rows = play("ff", ids[0]) + play("fs", ids[1]) + play("ss", ids[2]) + play("ss", ids[3])
    (change,) = changes_of(rows, ids, Training([BASE, *starts, *ends]))
    assert change.effect is not None
    # Seeds at 0 and 1: standard deviation 0.7071, t of 1 degree 12.706, sqrt(2/2).
    assert change.effect.half_width == pytest.approx(8.985, abs=1e-3)
    assert change.effect.verdict is Verdict.NOT_SHOWN


def test_results_on_other_desktops_give_a_reason_instead_of_a_difference() -> None:
    rows = eval_rows("f", checkpoint="base", desktops="a") + eval_rows("s", checkpoint="sft", desktops="b")
    (change,) = changes_of(rows, ["base", "sft"], Training(chain_of(Stage.BASE, Stage.SFT)))
    assert (change.effect, change.families) == (None, ())
    assert "different desktop images" in change.apart


def test_families_that_moved_most_come_first_and_faults_do_not_move_them() -> None:
    before = eval_rows({"a": "ff", "b": "fs"}, family="files") + eval_rows({"c": "ss", "d": "fe"}, family="dialogs")
    after = eval_rows({"a": "ss", "b": "fs"}, family="files") + eval_rows({"c": "ss", "d": "ee"}, family="dialogs")
    files, dialogs = family_changes(before, after)
    assert (files.family, files.difference, files.num_tasks) == ("files", 0.5, 2)
    assert (files.before_successes, files.before_n, files.after_successes, files.after_n) == (1, 4, 3, 4)
    assert (dialogs.difference, dialogs.num_tasks) == (0.0, 1), "task d has no valid sample after"
