"""Metrics over updates: a plot for each, in order, for any values; and all of them as one picture."""

import math
import xml.etree.ElementTree as ElementTree

from hypothesis import example, given
from hypothesis import strategies as st

from osworld_pipeline.evaluation.training_record import MetricPoint
from osworld_pipeline.web.charts.metrics import stage_charts
from osworld_pipeline.web.charts.picture import draw_picture
from osworld_pipeline.web.charts.plots import Chart

SVG = "{http://www.w3.org/2000/svg}"


def points(name: str, *values: float, stage: str = "sft") -> list[MetricPoint]:
    return [MetricPoint(stage=stage, update=update, name=name, value=value) for update, value in enumerate(values)]


def charts_of(found: list[MetricPoint]) -> list[Chart]:
    return [chart for _, charts in stage_charts(found) for chart in charts]


def test_plots_are_in_the_order_of_training_and_of_the_metrics() -> None:
    found = stage_charts(
        [*points("zeta", 1), *points("kl", 1), *points("loss", 1, stage="gspo_phase1"), *points("loss", 1)]
    )
    assert [(stage, [chart.title for chart in charts]) for stage, charts in found] == [
        ("sft", ["Loss", "KL to the reference", "Zeta"]),
        ("gspo_phase1", ["Loss"]),
    ]


def test_values_that_are_not_finite_are_left_out_and_a_resumed_update_counts_once() -> None:
    (chart,) = charts_of([*points("loss", 1.0, math.nan, math.inf), *points("loss", 3.0)])
    assert chart.rows == (("0", "3"),)
    assert charts_of(points("loss", math.nan)) == []


def test_a_long_curve_is_drawn_with_few_points_which_are_means() -> None:
    (chart,) = charts_of(points("loss", *map(float, range(5000))))
    assert len(chart.rows) <= 60
    assert chart.note == "Each point covers 84 updates."
    assert chart.rows[0] == ("0 to 83", "41.5")


def test_a_picture_has_every_plot_with_its_title_and_the_style_it_needs() -> None:
    charts = charts_of(
        [*points("loss", 3.0, 2.0), *points("grad_norm", 0.5), *points("kl", 0.1), *points("entropy", 0.2)]
    )
    picture = ElementTree.fromstring(draw_picture(charts))
    titles = [text.text for text in picture.findall(f"{SVG}text")]
    assert titles == ["Loss", "Gradient norm", "KL to the reference", "Entropy"]
    plots = [(float(one.attrib["x"]), float(one.attrib["y"])) for one in picture if one.get("role") == "img"]
    assert len({x for x, _ in plots}) == 3
    assert len({y for _, y in plots}) == 2
    assert len(set(plots)) == 4
    style = picture.findtext(f"{SVG}style") or ""
    assert "--k0" in style
    assert all(f".{name}" in style for name in ("grid", "axis", "line", "dot"))


@example("loss", [2.3e293, -1.7e308, 1.7e308])
@example("loss", [0.0, 5e-324])
@example("loss", [5e-324])
@given(st.text(min_size=1, max_size=20), st.lists(st.floats(), min_size=1, max_size=6))
def test_any_names_and_values_give_whole_xml_inside_the_picture(name: str, values: list[float]) -> None:
    charts = charts_of(points("".join(char for char in name if char.isprintable()), *values))
    if not charts:
        return
    picture = ElementTree.fromstring(draw_picture(charts))
    (plot,) = [one for one in picture if one.get("role") == "img"]
    width, height = (float(size) for size in plot.attrib["viewBox"].split()[2:])
    for dot in plot.iter("circle"):
        assert 0 <= float(dot.attrib["cx"]) <= width
        assert 0 <= float(dot.attrib["cy"]) <= height
