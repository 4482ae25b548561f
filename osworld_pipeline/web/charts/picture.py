"""Plots as one picture, for a page without our style sheet."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

from osworld_pipeline.web.charts.plots import HEIGHT, WIDTH, Chart
from osworld_pipeline.web.pages import style

HEAD, GAP = 26, 14
"""Height of a title, and the space around a plot."""


def draw_picture(charts: Sequence[Chart], *, columns: int = 3) -> str:
    columns = min(columns, len(charts))
    width, height = columns * (WIDTH + GAP) + GAP, -(-len(charts) // columns) * (HEIGHT + HEAD) + GAP
    size = {"width": str(width), "height": str(height)}
    picture = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "chart", **size})
    SubElement(picture, "style").text = style("charts.css")
    SubElement(picture, "rect", {"class": "ground", "width": "100%", "height": "100%"})
    for index, chart in enumerate(charts):
        x, y = GAP + index % columns * (WIDTH + GAP), index // columns * (HEIGHT + HEAD)
        SubElement(picture, "text", {"class": "title", "x": str(x), "y": str(y + HEAD - 7)}).text = chart.title
        plot = fromstring(chart.svg)  # noqa: S314 - our own picture
        plot.attrib |= {"x": str(x), "y": str(y + HEAD), "width": str(WIDTH), "height": str(HEIGHT)}
        picture.append(plot)
    return tostring(picture, encoding="unicode")
