"""Plots: their numbers, words and positions, for any values."""

import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.web.charts.plots import HEIGHT, WIDTH, Point, Series, line_chart, number, stacked_chart
from osworld_pipeline.web.charts.ticks import Bins, nice_ticks

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


def series(*values: float, name: str = "loss", colour: int = 0) -> Series:
    return Series(name=name, points=tuple(Point(x=x, y=y) for x, y in enumerate(values, 1)), colour=colour)


def texts(svg: str, kind: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter("text") if text.get("class") == kind]


def test_a_line_has_axes_with_labels_its_numbers_and_words() -> None:
    chart = line_chart("Loss", [series(3.0, 2.0, 1.0)], x_label="update", y_label="nats")
    assert chart is not None
    assert texts(chart.svg, "label") == ["nats", "update"]
    assert texts(chart.svg, "tick")[:5] == ["1.0", "1.5", "2.0", "2.5", "3.0"]
    assert chart.about == "Loss: from 3 at 1 to 1 at 3."
    assert ElementTree.fromstring(chart.svg).get("aria-label") == chart.about
    assert (chart.columns, chart.rows) == (("update", "loss"), (("1", "3"), ("2", "2"), ("3", "1")))
    assert chart.legend == ()


def test_several_lines_have_a_legend_and_a_band_its_own_columns() -> None:
    banded = Series(name="success", points=(Point(x=1, y=0.5, low=0.25, high=0.75, label="1 to 5"),), colour=1)
    chart = line_chart("S", [banded, series(0.1)], x_label="u", y_label="", is_share=True, band="interval at 95%")
    assert chart is not None
    assert chart.legend == ((1, "success"), (0, "loss"))
    assert chart.columns == ("u", "success", "success, from", "success, to", "loss", "loss, from", "loss, to")
    assert chart.rows == (("1", "50.0%", "25.0%", "75.0%", "10.0%", "–", "–"),)


def test_a_value_that_is_not_finite_leaves_a_gap_and_no_finite_value_gives_no_chart() -> None:
    chart = line_chart("L", [series(1.0, 2.0, math.nan, 4.0, 5.0)], x_label="u", y_label="")
    assert chart is not None
    assert chart.svg.count("<polyline") == 2
    assert chart.rows[2] == ("3", "–")
    assert line_chart("L", [series(math.nan)], x_label="u", y_label="") is None
    assert line_chart("L", [], x_label="u", y_label="") is None


def test_columns_are_stacked_and_fill_the_height() -> None:
    chart = stacked_chart("O", [series(1, 3, name="a"), series(3, 1, name="b")], x_label="u", y_label="", is_share=True)
    assert chart is not None
    bars = [bar.attrib for bar in ElementTree.fromstring(chart.svg).iter("rect")]
    first, second = bars[0], bars[1]
    assert float(second["y"]) + float(second["height"]) == pytest.approx(float(first["y"]), abs=0.11)
    assert float(first["height"]) + float(second["height"]) == pytest.approx(HEIGHT - 22 - 34, abs=0.2)
    assert chart.rows == (("1", "25.0%", "75.0%"), ("2", "75.0%", "25.0%"))
    assert chart.about == "O, shares of the total: a 50%, b 50%."


def test_a_series_of_zeros_is_left_out_of_a_stack() -> None:
    chart = stacked_chart("O", [series(0, 0, name="a"), series(1, 0, name="b")], x_label="u", y_label="")
    assert chart is not None
    assert chart.legend == ((0, "b"),)
    assert stacked_chart("O", [series(0, 0)], x_label="u", y_label="") is None


@given(
    st.text(max_size=12),
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=6),
    st.booleans(),
)
def test_any_values_stay_inside_the_picture(
    name: str, values: list[tuple[float, float, float]], is_share: bool
) -> None:
    words = "".join(char for char in name if char.isprintable())
    points = tuple(
        Point(x=x, y=y, low=low if math.isfinite(low) else None, high=high if math.isfinite(high) else None)
        for x, (y, low, high) in enumerate(values)
    )
    chart = line_chart(words, [Series(name=words, points=points)], x_label="x", y_label="y", is_share=is_share)
    if chart is None:
        return
    picture = ElementTree.fromstring(chart.svg)
    places = [pair for line in picture.iter("polyline") for pair in line.attrib["points"].split()]
    places += [f"{dot.attrib['cx']},{dot.attrib['cy']}" for dot in picture.iter("circle")]
    for place in places:
        x, y = map(float, place.split(","))
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT


@pytest.mark.parametrize(
    ("ends", "reported"),
    [
        ((0, 1), (0, 0.5, 1)),
        ((3, 7), (3, 4, 5, 6, 7)),
        ((0.00012, 0.00047), (0.0001, 0.0002, 0.0003, 0.0004, 0.0005)),
        ((5, 5), (2, 4, 6, 8)),
        ((0, 0), (0, 0.5, 1)),
        ((5e-324, 5e-324), (0, 0.5, 1)),
        ((-3, 4), (-4, -2, 0, 2, 4)),
    ],
)
def test_ticks_are_round_numbers_around_the_ends(ends: tuple[float, float], reported: tuple[float, ...]) -> None:
    assert nice_ticks(*ends) == pytest.approx(reported)


@given(NUMBERS.filter(math.isfinite), NUMBERS.filter(math.isfinite), st.integers(2, 8))
def test_ticks_cover_both_ends_in_ascending_order(one: float, other: float, limit: int) -> None:
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high, limit=limit)
    assert 2 <= len(ticks) <= 2 * limit + 3
    assert all(left < right for left, right in pairwise(ticks))
    slack = 1e-6 * max(1e-30, high - low, abs(high), abs(low))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack


def test_an_axis_with_an_infinite_end_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to inf"):
        nice_ticks(0, math.inf)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40), st.integers(1, 60))
def test_bins_hold_every_update_once_and_stay_within_the_limit(updates: list[int], limit: int) -> None:
    bins = Bins.over(updates, limit=limit)
    assert 1 <= len(bins) <= limit
    found = bins.gather((update, update) for update in updates)
    assert sorted(value for values in found.values() for value in values) == sorted(updates)
    assert all(0 <= index < len(bins) for index in found)
    assert all(min(updates) <= bins.centre(index) <= max(updates) for index in range(len(bins)))


def test_bins_say_which_updates_a_point_covers() -> None:
    bins = Bins.over(range(1, 8), limit=3)
    assert [bins.label(index) for index in range(len(bins))] == ["1 to 3", "4 to 6", "7"]
    assert bins.note == "Each point covers 3 updates."
    assert Bins.over([4, 5]).note == ""
    with pytest.raises(ValueError, match="no update"):
        Bins.over([])


@pytest.mark.parametrize(
    ("value", "reported"),
    [(0.0, "0"), (3.0, "3"), (1234567.0, "1.23e+06"), (1250.4, "1,250"), (0.12345, "0.123"), (math.nan, "–")],
)
def test_numbers_are_formatted_for_people(value: float, reported: str) -> None:
    assert number(value) == reported
