"""Curves as pictures: a panel for each metric, whole XML whatever names and values, no more points than pixels."""

import xml.etree.ElementTree as ElementTree

from hypothesis import example, given
from hypothesis import strategies as st

from osworld_pipeline.evaluation.training_record import MetricPoint
from osworld_pipeline.web.charts.curves import HEIGHT, MAX_POINTS, WIDTH, curves_svg, draw_curves

SVG = "{http://www.w3.org/2000/svg}"


def points(name: str, *values: float) -> list[MetricPoint]:
    return [MetricPoint(stage="sft", update=update, name=name, value=value) for update, value in enumerate(values)]


def test_each_metric_has_a_panel_with_its_line_and_its_last_value() -> None:
    curves = draw_curves([*points("loss", 3.0, 2.0, 1.0), *points("grad_norm", 0.5)])
    assert [curve.name for curve in curves] == ["loss", "grad_norm"]
    picture = ElementTree.fromstring(curves_svg(curves))
    assert len(picture.findall(f".//{SVG}polyline")) == 2
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert texts == ["loss", "3", "1", "updates 0 to 2, last 1", "grad norm", "0.5", "updates 0 to 0, last 0.5"]


def test_a_long_curve_keeps_its_ends_and_its_scale_and_no_more_points_than_pixels() -> None:
    values = [0.0] * 5000
    values[777] = 9.0
    (curve,) = draw_curves(points("loss", *values, 4.0))
    line = curve.line.split()
    assert len(line) <= MAX_POINTS + 1
    assert (curve.low, curve.high, curve.last, curve.num_points) == (0.0, 9.0, 4.0, 5001)
    assert line[-1] == f"{curve.end[0]:.1f},{curve.end[1]:.1f}"


@example("loss", [2.3e293, -1.7e308, 1.7e308])
@example("loss", [0.0, 5e-324])
@given(st.text(min_size=1, max_size=20), st.lists(st.floats(), min_size=1, max_size=6))
def test_any_names_and_values_give_whole_xml_inside_the_panel(name: str, values: list[float]) -> None:
    curves = draw_curves(points("".join(c for c in name if c.isprintable()), *values))
    if not curves:
        return
    picture = ElementTree.fromstring(curves_svg(curves))
    for line in picture.iter(f"{SVG}polyline"):
        for place in line.attrib["points"].split():
            x, y = map(float, place.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT
