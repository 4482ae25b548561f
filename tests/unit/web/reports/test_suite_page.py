"""The page of a suite: its leaderboard, the comparisons, what changed task by task, and what a success cost."""

from pathlib import Path

import pytest
from checkpoint_samples import make_checkpoint
from episode_samples import make_episode
from eval_samples import KEY, eval_rows
from page_reader import Reader, read_page

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.episode import EpisodePurpose, SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.leaderboard import LeaderboardTable, build_leaderboard
from osworld_pipeline.evaluation.scores import EvalRow
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.web.reports.report_index import write_index
from osworld_pipeline.web.reports.suite_page import (
    MAX_CHANGES,
    MAX_COLUMNS,
    by_domain,
    by_task,
    outcome_mix,
    pairs_of,
    suite_file,
    write_suite_page,
)

EVIL = '<img src=x onerror="alert(1)">'
CHECKPOINTS = [
    make_checkpoint("base", Stage.BASE, num_updates=0),
    make_checkpoint("sft", parent_id="base", num_updates=4),
    make_checkpoint("sft-u0002", parent_id="base", num_updates=2),
]
PARENTS = {one.checkpoint_id: one.parent_id for one in CHECKPOINTS}


def rows_of(**played: str) -> list[EvalRow]:
    return [
        row
        for name, letters in played.items()
        for row in eval_rows(letters, checkpoint=name.replace("__", "-"), response_tokens=10, wall_s=2.0, reset_s=0.5,
                             step_s=1.0, evaluate_s=0.5, model_s=0.25, prompt_tokens=100)
    ]  # fmt: skip


ROWS = rows_of(base="fffffffe", sft="sssssssf", sft__u0002="ssssfff")


def table_of(rows: list[EvalRow]) -> LeaderboardTable:
    planned = {row.stage_key: max(8, len({row.task_id for row in rows})) for row in rows}
    (table,) = build_leaderboard(rows, PARENTS, planned=planned, num_resamples=500).tables
    return table


def write(state: StateDir, rows: list[EvalRow], **changes) -> Reader:
    options = {
        "suite_name": "mine", "suite_digest": "d1", "recipe_name": "demo", "confidence": 0.95,
        "checkpoints": CHECKPOINTS,
    }  # fmt: skip
    return read_page(write_suite_page(state, table_of(rows), rows, **(options | changes)))


def test_the_page_has_ranks_intervals_and_what_is_missing(tmp_path: Path) -> None:
    text = write(StateDir(tmp_path), ROWS).text
    for reported in ("87.5%", "7 of 8", "57.1%", "0 of 7", "mine", "d1", KEY, "env fault", "better", "demo"):
        assert reported in text, reported
    assert "no rank" in text


def test_each_checkpoint_is_compared_with_its_parent_and_with_the_best() -> None:
    pairs = {(pair.checkpoint_id, pair.versus.checkpoint_id): pair for pair in pairs_of(table_of(ROWS), ROWS)}
    assert set(pairs) == {("sft", "base"), ("sft-u0002", "base"), ("sft-u0002", "sft"), ("base", "sft")}
    assert pairs["sft", "base"].effect.words == "one run: better"
    assert [change.task_id for change in pairs["sft-u0002", "sft"].regressions] == ["e", "f", "g"]
    assert pairs["sft-u0002", "sft"].gains == ()


def test_long_lists_of_changes_are_cut_and_say_so() -> None:
    tasks = {f"t{number:03d}": "f" for number in range(MAX_CHANGES + 7)}
    rows = eval_rows(tasks, checkpoint="base") + eval_rows(dict.fromkeys(tasks, "s"), checkpoint="sft")
    (pair,) = [pair for pair in pairs_of(table_of(rows), rows) if pair.checkpoint_id == "sft"]
    assert (len(pair.gains), pair.num_more) == (MAX_CHANGES, 7)


def test_outcomes_fill_the_bar() -> None:
    row = next(row for row in table_of(ROWS).rows if row.score.checkpoint_id == "base")
    mix = outcome_mix(row)
    assert [(part.name, part.count, part.start, part.share) for part in mix] == [
        ("failure", 7, 0.0, 0.875), ("env_fault", 1, 0.875, 0.125),
    ]  # fmt: skip


def test_tasks_on_which_checkpoints_differ_come_first() -> None:
    found = by_task(ROWS, ["sft", "base"])
    assert [row.name for row in found] == ["a", "b", "c", "d", "e", "f", "g", "h"]
    assert [rate and (rate.successes, rate.n) for rate in found[0].rates] == [(1, 1), (0, 1)]
    assert found[-1].rates[1] is None, "a fault is no rate of zero"


def test_domains_have_a_rate_for_each_checkpoint() -> None:
    (domain,) = by_domain(ROWS, ["sft", "base"], confidence=0.95)
    assert domain.name == "f"
    assert [rate and (rate.successes, rate.n) for rate in domain.rates] == [(7, 8), (0, 7)]


def test_the_cost_of_a_success_includes_all_episodes(tmp_path: Path) -> None:
    text = write(StateDir(tmp_path), rows_of(sft="sfff")).text
    reported = text.partition("What a success cost")[2].partition("Task by task")[0]
    figures = reported.rpartition("sft")[2].split()
    assert figures == ["40", "400", "1", "8", "8", "2"], "tokens sampled and read, seconds; the last of an episode"


def test_many_checkpoints_are_all_ranked_and_the_first_are_shown_side_by_side(tmp_path: Path) -> None:
    names = [f"c{number:02d}" for number in range(MAX_COLUMNS + 3)]
    rows = [row for name in names for row in eval_rows("sf", checkpoint=name)]
    page = write(StateDir(tmp_path), rows, checkpoints=[])
    assert all(page.text.count(name) >= 2 for name in names)
    assert f"The first {MAX_COLUMNS} checkpoints of {MAX_COLUMNS + 3}." in page.text


def test_checkpoints_of_one_stage_are_plotted_by_updates(tmp_path: Path) -> None:
    assert "By updates" in write(StateDir(tmp_path), ROWS).text
    assert "By updates" not in write(StateDir(tmp_path), rows_of(base="ff", sft="ss")).text


def test_names_are_shown_and_never_run(tmp_path: Path) -> None:
    rows = eval_rows({EVIL: "se"}, checkpoint="sft", error=EVIL)
    page = write(StateDir(tmp_path), rows, recipe_name=EVIL)
    assert EVIL in page.text
    assert not {"script", "img", "link"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_every_picture_has_a_text_label(tmp_path: Path) -> None:
    page = write(StateDir(tmp_path), ROWS)
    num_pictures = sum(1 for pair in page.attributes if pair == ("role", "img"))
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert num_pictures >= 3 + 4 + 3
    assert len(labels) > num_pictures
    assert all(labels)


def test_the_index_lists_every_report_in_the_folder(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    write(state, ROWS)
    (state.reports / "training-gspo_phase1-00ff.html").write_text("")
    page = read_page(write_index(state))
    assert [value for name, value in page.attributes if name == "href"] == [
        suite_file("mine", KEY), "training-gspo_phase1-00ff.html",
    ]  # fmt: skip
    assert f"mine {KEY} written" in page.text
    assert "GSPO phase 1 00ff written" in page.text


def test_the_index_names_evaluations_and_runs_by_what_they_were_and_sorts_them_by_time(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    store = TrajectoryStore(state)
    for seconds, key, temperature in ((20, "0a", 0.6), (10, "ff", 0.0)):
        store.write_episodes(key, [
            make_episode(key, task_id="mine-a-1", checkpoint_id="c", stage_key=f"eval-c-{key}",
                         started_at=1e9 + seconds, sampling=SamplingParams(temperature=temperature)),
        ])  # fmt: skip
    for seconds, name in ((40, "gspo_phase1-0a"), (30, "gspo_phase1-ff")):
        store.write_episodes(name, [
            make_episode(name, purpose=EpisodePurpose.TRAIN, stage_key=name, update=2, started_at=1e9 + seconds),
        ])  # fmt: skip
    state.reports.mkdir()
    for name in ("suite-mine-0a", "suite-mine-ff", "training-gspo_phase1-0a", "training-gspo_phase1-ff",
                 "training-sft-99"):  # fmt: skip
        (state.reports / f"{name}.html").write_text("")
    text = read_page(write_index(state)).text
    reported = [
        "mine · seed 0 · T 0 ff written", "mine · seed 0 · T 0.6 0a written", "SFT 99 written",
        "GSPO phase 1 · 3 updates rolled out · begun 2001-09-09 01:47 UTC ff written",
        "GSPO phase 1 · 3 updates rolled out · begun 2001-09-09 01:47 UTC 0a written",
    ]  # fmt: skip
    places = [text.find(one) for one in reported]
    assert -1 not in places
    assert places == sorted(places)


def test_the_page_of_a_suite_says_how_it_was_evaluated(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    for seed in range(3):
        TrajectoryStore(state).write_episodes(f"p{seed}", [
            make_episode(f"e{seed}", checkpoint_id="sft", stage_key=f"eval-sft-{KEY}", seed=seed,
                         sampling=SamplingParams(temperature=0.6)),
        ])  # fmt: skip
    assert f"mine 3 seeds · T 0.6 · {KEY}" in write(state, ROWS).text


@pytest.mark.parametrize("letters", ["e", "eg"])
def test_an_evaluation_of_faults_alone_has_a_page(tmp_path: Path, letters: str) -> None:
    assert "no valid episode" in write(StateDir(tmp_path), rows_of(sft=letters)).text
