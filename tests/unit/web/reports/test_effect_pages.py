"""Effects on the pages of reports: several training runs are judged together, and curves show their start's spread."""

from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest
from effect_samples import ENDS, MILESTONE, RECIPE, START, write_three_runs
from page_reader import read_page

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.changes import Training, changes_of_stage
from osworld_pipeline.evaluation.effect import RULE
from osworld_pipeline.evaluation.scores import read_evals
from osworld_pipeline.evaluation.training_record import read_training
from osworld_pipeline.runs.evaluate.report import make_report, make_suite_report, make_training_report
from osworld_pipeline.tables.checkpoints import read_checkpoints
from osworld_pipeline.web.charts.plots import Chart, Point, Series, Zone, line_chart
from osworld_pipeline.web.charts.start_zone import start_zone
from osworld_pipeline.web.charts.training import training_sections

EFFECT = "effect over 3 runs: better"
BY_RUN = "+50.0, +42.9, +53.6"
"""14, 12 and 15 of 28 tasks more, with each of three seeds."""
END_IDS = [end.checkpoint_id for end in ENDS]
ZONE = f"spread of the start {START.checkpoint_id} over 3 evaluation seeds, at 95%: 15.4% to 29.9%."
# Seeds at 7/28, 6/28 and 6/28: standard deviation 1/28/sqrt(3), so 4.3027 / 28 / sqrt(3) * sqrt(2/3) = 7.24 points
# around 19/84 = 22.6%.


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    state = StateDir(tmp_path_factory.mktemp("state"))
    write_three_runs(state)
    return state


def uri_of(state: StateDir) -> str:
    return f"sqlite:///{state.mlflow_db}"


def test_the_report_judges_the_runs_of_one_training_together(state: StateDir) -> None:
    ids = [START.checkpoint_id, MILESTONE.checkpoint_id, *END_IDS]
    text = read_page(make_report(state, RECIPE, checkpoint_ids=ids, tracking_uri=uri_of(state))).text
    reported = text.partition("What training changed")[2].partition("By family of tasks")[0]
    for words in ("GSPO phase 1 against SFT", EFFECT, BY_RUN, "±7.2", RULE):
        assert words in reported, words
    assert reported.count("against SFT") == 1, "one line for three runs"
    assert MILESTONE.checkpoint_id not in reported, "a milestone is a point of a curve"


def test_a_report_of_one_run_calls_nothing_an_effect(state: StateDir) -> None:
    ids = [START.checkpoint_id, END_IDS[0]]
    text = read_page(make_report(state, RECIPE, checkpoint_ids=ids, tracking_uri=uri_of(state))).text
    assert "one run: better" in text
    assert "an effect needs 3 training runs" in text
    assert "effect over" not in text


def test_the_page_of_a_suite_judges_runs_together_and_each_pair_alone(state: StateDir) -> None:
    text = read_page(make_suite_report(state, RECIPE, "heldout")).text
    before, _, after = text.partition("Paired comparisons")
    assert EFFECT in before
    assert "one run: better" in after
    assert "effect over" not in after
    assert ZONE in after, "above the curve over updates"


def test_the_page_of_a_training_says_what_it_changed_and_shows_its_starts_band(state: StateDir) -> None:
    text = read_page(make_training_report(state, END_IDS[0], tracking_uri=uri_of(state))).text
    reported = text.partition("What it changed")[2].partition("Evaluated suites")[0]
    assert EFFECT in reported
    assert BY_RUN in reported
    record = read_training(state, END_IDS[0], checkpoints=read_checkpoints(state), evals=read_evals(state))
    assert success_of(record).zones == (ZONE,)


def success_of(record) -> Chart:
    charts = [chart for section in training_sections(record) for chart in section.charts]
    return next(chart for chart in charts if chart.title == "Success on evaluated tasks")


def test_a_running_stage_is_judged_by_its_newest_milestone(state: StateDir) -> None:
    checkpoints = [one for one in read_checkpoints(state) if one.checkpoint_id != END_IDS[0]]
    ((_, change),) = changes_of_stage(read_evals(state), {MILESTONE.checkpoint_id: 2}, Training(checkpoints))
    assert change.ends == (MILESTONE.checkpoint_id,)
    assert change.effect is not None
    assert change.effect.words == "one run: better"


def test_a_start_with_one_seed_has_no_zone(state: StateDir) -> None:
    rows = [row for row in read_evals(state) if row.checkpoint_id == START.checkpoint_id]
    assert start_zone([row for row in rows if row.seed == 0], confidence=0.95) is None
    assert start_zone([], confidence=0.95) is None


def test_a_zone_lies_between_its_ends_over_the_whole_plot(tmp_path: Path) -> None:
    points = (Point(x=0, y=0.0), Point(x=4, y=1.0))
    chart = line_chart(
        "S", [Series(name="s", points=points)], x_label="u", y_label="", is_share=True,
        zones=[Zone(name="of the start", low=0.25, high=0.75)],
    )  # fmt: skip
    assert chart is not None
    assert chart.zones == ("of the start: 25.0% to 75.0%.",)
    (zone,) = [one for one in fromstring(chart.svg).iter("rect") if one.get("class") == "zone k0"]
    dots = [(float(dot.get("cx", 0)), float(dot.get("cy", 0))) for dot in fromstring(chart.svg).iter("circle")]
    (left, bottom), (right, top) = dots
    assert float(zone.get("x", 0)) == pytest.approx(left)
    assert float(zone.get("width", 0)) == pytest.approx(right - left)
    assert float(zone.get("y", 0)) == pytest.approx(top + (bottom - top) / 4, abs=0.11)
    assert float(zone.get("height", 0)) == pytest.approx((bottom - top) / 2, abs=0.11)


def test_a_zone_beyond_the_line_widens_the_axis() -> None:
    points = (Point(x=0, y=1.0), Point(x=4, y=2.0))
    chart = line_chart(
        "S", [Series(name="s", points=points)], x_label="u", y_label="", zones=[Zone(name="z", low=-3.0, high=9.0)]
    )
    assert chart is not None
    (zone,) = [one for one in fromstring(chart.svg).iter("rect") if one.get("class") == "zone k0"]
    lowest = max(float(dot.get("cy", 0)) for dot in fromstring(chart.svg).iter("circle"))
    assert float(zone.get("y", 0)) + float(zone.get("height", 0)) > lowest
