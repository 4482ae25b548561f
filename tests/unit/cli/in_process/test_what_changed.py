"""What the demo prints below its scores."""

import io

from checkpoint_samples import CHAIN, chain_of
from eval_samples import eval_rows
from rich.console import Console

from osworld_pipeline.cli.in_process.what_changed import show_changes
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.evaluation.changes import Training, changes_of
from osworld_pipeline.evaluation.effect import ONE_RUN
from osworld_pipeline.evaluation.replay_share import ReplayShare

REPLAY = ReplayShare(num_groups=72, num_injected=2, num_tasks=1, num_solved_later=0)
FIRST = {f"t{number}": "f" for number in range(8)}
LETTERS = {
    "base": FIRST,
    "sft": FIRST | dict.fromkeys(list(FIRST)[:7], "s"),
    "gspo_phase1": FIRST | dict.fromkeys(list(FIRST)[:6], "s"),
    "gspo_phase2": dict.fromkeys(FIRST, "s"),
}


def shown(
    *stages: Stage,
    replay: ReplayShare = REPLAY,
    desktops: str = "",
    without: tuple[str, str] | None = None,
    width: int = 80,
) -> list[str]:
    """The printed lines. `without` is a checkpoint and the task that it was not evaluated on."""
    chain = chain_of(*stages)
    rows = [
        row
        for stage in stages
        for task, letter in LETTERS[stage].items()
        if (stage, task) != without
        for row in eval_rows({task: letter}, checkpoint=stage, desktops=desktops and f"{desktops}{stage}",
                             family="close_window" if task == "t7" else "click")
    ]  # fmt: skip
    changes = changes_of(rows, [one.checkpoint_id for one in chain], Training(chain))
    sink = io.StringIO()
    show_changes(changes, replay, Console(file=sink, width=width))
    return sink.getvalue().splitlines()


def test_a_line_for_each_comparison_says_points_interval_and_verdict_below_tasks_and_seeds() -> None:
    whole = shown(*CHAIN)
    assert "What changed on held-out tasks, paired by task: 8 tasks, 1 evaluation seed" in [
        line.strip() for line in whole
    ]
    lines = [line.split() for line in whole]
    # 7 of 8 tasks gained: 7/8 = 87.5 points; p = 2/2^7.
    (sft,) = [line for line in lines if line[:3] == ["SFT", "against", "Base"]]
    assert sft[3] == "+87.5"
    assert sft[-3:] == ["one", "run:", "better"]
    (second,) = [line for line in lines if line[:5] == ["phase", "2", "against", "phase", "1"]]
    # t6 and t7: 2/8 = 25 points; two tasks prove nothing.
    assert second[5] == "+25.0"
    assert second[-5:] == ["one", "run:", "no", "significant", "difference"]
    assert sum("against" in line and "Families" not in line for line in lines) == 4


def test_the_title_is_one_line_above_a_table_that_is_narrower() -> None:
    lines = shown("base", "sft")
    title = lines.index("What changed on held-out tasks, paired by task: 8 tasks, 1 evaluation seed")
    assert max(len(line.rstrip()) for line in lines[title + 1 : title + 3]) < len(lines[title])


def test_comparisons_over_different_tasks_show_the_number_of_tasks_of_each() -> None:
    lines = [line.split() for line in shown(*CHAIN, without=("gspo_phase2", "t0"), width=110)]
    (sft,) = [line for line in lines if line[:3] == ["SFT", "against", "Base"]]
    assert sft[-5:] == ["8", "1", "one", "run:", "better"]
    (second,) = [line for line in lines if line[:5] == ["phase", "2", "against", "phase", "1"]]
    assert second[-7:] == ["7", "1", "one", "run:", "no", "significant", "difference"]


def test_families_that_moved_from_sft_to_phase_2_have_a_line_each() -> None:
    lines = shown(*CHAIN)
    start = lines.index("Families of tasks, phase 2 against SFT:")
    assert lines[start + 1] == "  close window  +100.0 points, 0/1 to 1/1"
    assert lines[start + 2] == "  no change: click"


def test_replay_and_the_one_seed_are_mentioned_at_the_end() -> None:
    assert shown(*CHAIN)[-2:] == [
        "Replay: a recorded success joined 2 of 72 groups, of 1 task; 0 of these tasks were solved for the first time "
        "after that, by the policy alone.",
        ONE_RUN,
    ]


def test_stages_that_were_not_run_are_not_mentioned() -> None:
    none = ReplayShare(num_groups=0, num_injected=0, num_tasks=0, num_solved_later=0)
    lines = shown(Stage.BASE, Stage.SFT, replay=none)
    assert not [line for line in lines if "phase" in line or "Replay" in line or "Families" in line]
    assert lines[-1] == ONE_RUN


def test_evaluations_on_different_desktop_images_are_not_compared() -> None:
    assert not [line for line in shown(*CHAIN, desktops="image of ") if "against" in line]


def test_the_replay_line_says_that_no_demonstration_joined_a_group() -> None:
    none = ReplayShare(num_groups=36, num_injected=0, num_tasks=0, num_solved_later=0)
    assert "Replay: no recorded success joined any of 36 groups." in shown(*CHAIN, replay=none)
