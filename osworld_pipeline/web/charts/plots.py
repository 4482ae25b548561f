"""Plots as inline SVG: lines with bands, and stacked columns. Each has an alternative text and its numbers as a
table; colours are classes, so that one picture works on a light and a dark page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup

from osworld_pipeline.web.charts.ticks import nice_ticks
from osworld_pipeline.web.formats import number

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 22, 34
LARGEST = 1e300
NUM_COLOURS = 9
"""Classes k0 to k8 of the page's style."""


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: float
    """NaN, and values that are not `is_drawn`, leave a gap."""
    low: float | None = None
    high: float | None = None
    """Ends of the band around it; None for no band."""
    label: str = ""
    """Label of x in the table; x itself if empty."""


@dataclass(frozen=True, kw_only=True)
class Series:
    name: str
    points: tuple[Point, ...]
    colour: int = 0


@dataclass(frozen=True, kw_only=True)
class Zone:
    """A horizontal band over the whole width."""

    name: str
    low: float
    high: float
    colour: int = 0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A plot, its description, and its numbers."""

    title: str
    about: str
    svg: Markup
    legend: tuple[tuple[int, str], ...]
    """(colour, name); empty for a single series."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    band: str = ""
    """Description of the band; empty without one."""
    zones: tuple[str, ...] = ()
    """Description of each zone, with its ends."""


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    is_share: bool = False,
    y_range: tuple[float, float] | None = None,
    band: str = "",
    zones: Sequence[Zone] = (),
    note: str = "",
) -> Chart | None:
    """Lines over x; None if no point is finite. `is_share`: 0..1, shown in percent. `y_range`: fixed range; by default
    0 to 1 with `is_share`, else that of the values. `band`: description of `low` and `high`."""
    drawn = [one for one in series if any(is_drawn(point.y) for point in one.points)]
    if not drawn:
        return None
    values = [value for one in drawn for point in one.points for value in _extent(point)]
    values += [end for zone in zones for end in (zone.low, zone.high)]
    xs = [point.x for one in drawn for point in one.points]
    plane = _Plane.over(xs, values, y_range=y_range, is_share=is_share)
    svg = plane.open(title, about := _about_lines(title, drawn, is_share=is_share), x_label=x_label, y_label=y_label)
    descriptions = [_spelled_zone(zone, is_share=is_share) for zone in zones]
    for zone, words in zip(zones, descriptions, strict=True):
        _draw_zone(svg, plane, zone, words)
    for one in drawn:
        _draw_line(svg, plane, one, is_share=is_share)
    return Chart(
        title=title,
        about=about,
        svg=_markup(svg),
        legend=tuple((one.colour, one.name) for one in drawn) if len(drawn) > 1 else (),
        columns=(x_label, *(name for one in drawn for name in _columns_of(one, band, is_only=len(drawn) == 1))),
        rows=_rows(drawn, has_band=bool(band), is_share=is_share),
        note=note,
        band=band,
        zones=tuple(descriptions),
    )


def stacked_chart(
    title: str, series: Sequence[Series], *, x_label: str, y_label: str, is_share: bool = False, note: str = ""
) -> Chart | None:
    """Stacked columns over x, the first series at the bottom; every series has the same xs. None if all values are 0.
    `is_share`: each column as shares of its sum."""
    drawn = [one for one in series if any(point.y > 0 for point in one.points)]
    if not drawn:
        return None
    sums = [math.fsum(point.y for point in column) for column in zip(*(one.points for one in drawn), strict=True)]
    if is_share:
        drawn = [_shares(one, sums) for one in drawn]
        sums = [1.0]
    xs = [point.x for point in drawn[0].points]
    plane = _Plane.over(xs, [0.0, max(sums)], is_share=is_share, has_columns=True)
    svg = plane.open(title, about := _about_stack(title, drawn), x_label=x_label, y_label=y_label)
    width = plane.column_width(len(xs))
    for index in range(len(xs)):
        below = 0.0
        for one in drawn:
            point = one.points[index]
            _draw_column(svg, plane, one, point, below, width, is_share=is_share)
            below += point.y
    return Chart(
        title=title,
        about=about,
        svg=_markup(svg),
        legend=tuple((one.colour, one.name) for one in drawn),
        columns=(x_label, *(one.name for one in drawn)),
        rows=_rows(drawn, has_band=False, is_share=is_share),
        note=note,
    )


def is_drawn(value: float) -> bool:
    """Whether the value is finite, and not so large that a range overflows."""
    return abs(value) <= LARGEST


@dataclass(frozen=True, kw_only=True)
class _Plane:
    """Maps values to coordinates of the picture."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    is_share: bool

    @classmethod
    def over(
        cls,
        xs: Sequence[float],
        ys: Sequence[float],
        *,
        y_range: tuple[float, float] | None = None,
        is_share: bool = False,
        has_columns: bool = False,
    ) -> "_Plane":
        low, high = y_range or ((0.0, 1.0) if is_share else (min(ys), max(ys)))
        y_ticks = nice_ticks(low, high, limit=5)
        half = 0.5 if has_columns or min(xs) == max(xs) else 0.0
        return cls(
            x_low=min(xs) - half,
            x_high=max(xs) + half,
            y_low=min(low, y_ticks[0]),
            y_high=max(high, y_ticks[-1]),
            x_ticks=tuple(
                tick for tick in nice_ticks(min(xs), max(xs), limit=6, is_whole=True) if min(xs) <= tick <= max(xs)
            ),
            y_ticks=y_ticks,
            is_share=is_share,
        )

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (min(max(value, self.y_low), self.y_high) - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def column_width(self, num_columns: int) -> float:
        return max(1.0, min(40.0, 0.84 * (self.x(self.x_low + 1) - LEFT), 0.84 * (WIDTH - LEFT - RIGHT) / num_columns))

    def _tick(self, value: float) -> str:
        """The value with enough decimals to distinguish neighbouring ticks."""
        if self.is_share:
            return f"{value:.0%}"
        if value == 0:
            return "0"
        largest, step = max(map(abs, self.y_ticks)), self.y_ticks[1] - self.y_ticks[0]
        if not 1e-3 <= largest < 1e6:
            mantissa, _, exponent = f"{value:.1e}".partition("e")
            return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
        return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"

    def open(self, title: str, about: str, *, x_label: str, y_label: str) -> Element:
        """The picture with its axes."""
        svg = Element("svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": about, "class": "chart"})
        SubElement(svg, "title").text = title
        _text(svg, 0, 11, y_label, "label")
        for tick in self.y_ticks:
            y = self.y(tick)
            _line(svg, LEFT, y, WIDTH - RIGHT, y, "grid")
            _text(svg, LEFT - 5, y + 4, self._tick(tick), "tick", anchor="end")
        for tick in self.x_ticks:
            _text(svg, self.x(tick), HEIGHT - BOTTOM + 14, f"{tick:g}", "tick", anchor="middle")
        _line(svg, LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "axis")
        _text(svg, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, "label", anchor="middle")
        return svg


def _draw_zone(svg: Element, plane: _Plane, zone: Zone, words: str) -> None:
    top, bottom = plane.y(zone.high), plane.y(zone.low)
    size = (WIDTH - LEFT - RIGHT, max(1.0, bottom - top))
    _rectangle(svg, (LEFT, top), size, f"zone k{zone.colour % NUM_COLOURS}", words)


def _draw_line(svg: Element, plane: _Plane, series: Series, *, is_share: bool) -> None:
    colour = f"k{series.colour % NUM_COLOURS}"
    for run in _runs(series.points):
        upper = [(plane.x(p.x), plane.y(p.high)) for p in run if p.high is not None]
        lower = [(plane.x(p.x), plane.y(p.low)) for p in run if p.low is not None]
        if len(upper) > 1 and len(lower) > 1:
            SubElement(svg, "polygon", {"class": f"band {colour}", "points": _places([*upper, *reversed(lower)])})
        elif upper and lower:
            _line(svg, *lower[0], *upper[0], f"whisker {colour}")
        if len(run) > 1:
            places = _places([(plane.x(p.x), plane.y(p.y)) for p in run])
            SubElement(svg, "polyline", {"class": f"line {colour}", "points": places})
        for point in run:
            place = {"cx": f"{plane.x(point.x):.1f}", "cy": f"{plane.y(point.y):.1f}", "r": "2.2"}
            dot = SubElement(svg, "circle", {"class": f"dot {colour}", **place})
            SubElement(dot, "title").text = f"{series.name}, {_label(point)}: {_spelled(point, is_share=is_share)}"


def _draw_column(
    svg: Element, plane: _Plane, series: Series, point: Point, below: float, width: float, *, is_share: bool
) -> None:
    if not point.y > 0:
        return
    top, bottom = plane.y(below + point.y), plane.y(below)
    words = f"{series.name}, {_label(point)}: {number(point.y, is_share=is_share)}"
    corner = (plane.x(point.x) - width / 2, top)
    _rectangle(svg, corner, (width, bottom - top), f"column k{series.colour % NUM_COLOURS}", words)


def _rectangle(svg: Element, corner: tuple[float, float], size: tuple[float, float], style: str, words: str) -> None:
    """`words` are shown under the pointer."""
    box = {"x": corner[0], "y": corner[1], "width": size[0], "height": size[1]}
    drawn = SubElement(svg, "rect", {"class": style, **{name: f"{value:.1f}" for name, value in box.items()}})
    SubElement(drawn, "title").text = words


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Runs of finite points, split at points that are not finite."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if is_drawn(point.y):
            runs[-1].append(point)
        else:
            runs.append([])
    return [run for run in runs if run]


def _shares(series: Series, sums: Sequence[float]) -> Series:
    points = tuple(
        Point(x=point.x, y=point.y / total if total else 0.0, label=point.label)
        for point, total in zip(series.points, sums, strict=True)
    )
    return Series(name=series.name, points=points, colour=series.colour)


def _extent(point: Point) -> list[float]:
    return [value for value in (point.y, point.low, point.high) if value is not None and is_drawn(value)]


def _about_lines(title: str, series: Sequence[Series], *, is_share: bool) -> str:
    parts = []
    for one in series:
        points = [point for point in one.points if is_drawn(point.y)]
        first, last = points[0], points[-1]
        what = f"{one.name} " if len(series) > 1 else ""
        if len(points) == 1:
            parts.append(f"{what}{number(last.y, is_share=is_share)} at {_label(last)}")
        else:
            ends = f"{number(first.y, is_share=is_share)} at {_label(first)} to {number(last.y, is_share=is_share)}"
            parts.append(f"{what}from {ends} at {_label(last)}")
    return f"{title}: {'; '.join(parts)}."


def _about_stack(title: str, series: Sequence[Series]) -> str:
    sums = [(math.fsum(point.y for point in one.points), one.name) for one in series]
    total = math.fsum(value for value, _ in sums)
    shares = ", ".join(f"{name} {value / total:.0%}" for value, name in sums)
    return f"{title}, shares of the total: {shares}."


def _columns_of(series: Series, band: str, *, is_only: bool) -> list[str]:
    name = series.name
    return [name, f"{name}, from", f"{name}, to"] if band and not is_only else [name, "from", "to"] if band else [name]


def _rows(series: Sequence[Series], *, has_band: bool, is_share: bool) -> tuple[tuple[str, ...], ...]:
    labels: dict[float, str] = {}
    by_x: list[dict[float, Point]] = []
    for one in series:
        by_x.append({point.x: point for point in one.points})
        labels |= {point.x: _label(point) for point in one.points}
    rows = []
    for x in sorted(labels):
        cells = [labels[x]]
        for points in by_x:
            point = points.get(x, Point(x=x, y=math.nan))
            cells.append(number(point.y, is_share=is_share))
            if has_band:
                cells += [number(end, is_share=is_share) for end in (point.low, point.high)]
        rows.append(tuple(cells))
    return tuple(rows)


def _label(point: Point) -> str:
    return point.label or f"{point.x:g}"


def _spelled(point: Point, *, is_share: bool) -> str:
    value = number(point.y, is_share=is_share)
    if point.low is None or point.high is None:
        return value
    return f"{value} ({number(point.low, is_share=is_share)} to {number(point.high, is_share=is_share)})"


def _spelled_zone(zone: Zone, *, is_share: bool) -> str:
    return f"{zone.name}: {number(zone.low, is_share=is_share)} to {number(zone.high, is_share=is_share)}."


def _places(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _line(svg: Element, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    SubElement(svg, "line", {"class": kind, **ends})


def _text(svg: Element, x: float, y: float, words: str, kind: str, *, anchor: str = "start") -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "class": kind, "text-anchor": anchor}
    SubElement(svg, "text", place).text = words


def _markup(svg: Element) -> Markup:
    return Markup(tostring(svg, encoding="unicode"))  # noqa: S704 - its texts are escaped
