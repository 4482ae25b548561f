"""What every page shares: colours that can be told apart by everybody, and nothing from elsewhere."""

import re
from importlib import resources
from itertools import pairwise

import pytest

from osworld_pipeline.web.charts.training import FATE_COLOURS, OUTCOME_COLOURS
from osworld_pipeline.web.reports.page import render_page

STYLE = (resources.files("osworld_pipeline.web") / "templates/reports/page.html.jinja").read_text()
TEXT = ("ink", "soft", "accent", "good", "bad", "fault")
MARKS = tuple(f"k{number}" for number in range(8))


def colours(scheme: str) -> dict[str, tuple[float, float, float]]:
    """By variable, of the light or the dark scheme; red, green and blue from 0 to 1."""
    light, _, rest = STYLE.partition("@media (prefers-color-scheme: dark)")
    block = (light if scheme == "light" else rest).partition(":root {")[2].partition("}")[0]
    found = re.findall(r"--([a-z0-9]+): #([0-9a-f]{6})(?![0-9a-f])", block)
    return {name: tuple(int(value[at : at + 2], 16) / 255 for at in (0, 2, 4)) for name, value in found}  # pyright: ignore


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """As WCAG 2.2 defines it (relative luminance, 1.4.3)."""

    def luminance(colour: tuple[float, float, float]) -> float:
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", TEXT)
def test_text_can_be_read_on_every_ground(scheme: str, name: str) -> None:
    found = colours(scheme)
    assert contrast(found[name], found["bg"]) >= 4.5
    assert contrast(found[name], found["panel"]) >= 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", MARKS)
def test_lines_and_columns_stand_out(scheme: str, name: str) -> None:
    found = colours(scheme)
    assert contrast(found[name], found["panel"]) >= 3.0


def test_outcomes_and_fates_have_colours_of_their_own() -> None:
    assert len(set(OUTCOME_COLOURS.values())) == len(OUTCOME_COLOURS)
    assert len(set(FATE_COLOURS.values())) == len(FATE_COLOURS)


def test_a_page_may_load_and_run_nothing() -> None:
    html = render_page("index.html.jinja", groups={}, written_at="now")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1] == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert "<script" not in html
    assert "url(" not in html
    assert 'lang="en"' in html
    assert "width=device-width" in html


def test_headings_of_the_templates_step_down_one_at_a_time() -> None:
    for name in ("report", "training", "suite", "index"):
        text = (resources.files("osworld_pipeline.web") / f"templates/reports/{name}.html.jinja").read_text()
        levels = [int(level) for level in re.findall(r"<h([1-6])", text)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels)), name
