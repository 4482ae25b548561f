"""Every pair of text and background colours has the contrast that WCAG requires at level AA, light and dark; lines and
columns stand out."""

import re

import pytest

from osworld_pipeline.web.charts.plots import NUM_COLOURS
from osworld_pipeline.web.charts.training import OUTCOME_COLOURS, STATUS_COLOURS
from osworld_pipeline.web.pages import STATIC

AA, DRAWN = 4.5, 3.0
PAIRS = [
    *((text, back) for text in ("ink", "quiet", "accent") for back in ("paper", "card")),
    *((text, back) for text in ("good", "bad", "fault") for back in ("paper", "card", f"{text}-back")),
    *(("ink", back) for back in ("screen", "chosen", "t1", "t2", "t3", "t4")),
    *(("quiet", back) for back in ("screen", "chosen")),
    ("accent", "chosen"),
    ("bad", "chosen"),
    ("fault", "chosen"),
]
STYLES = [path.read_text() for path in sorted(STATIC.glob("*.css"))]


def blocks() -> list[str]:
    """The light and the dark palette, which are defined once."""
    found = re.findall(r":root \{(.*?)\}", "".join(STYLES), re.DOTALL)
    assert len(found) == 2
    return found


def palettes() -> dict[str, dict[str, str]]:
    found = [dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block)) for block in blocks()]
    return {"light": found[0], "dark": found[0] | found[1]}


def luminance(colour: str) -> float:
    """The relative luminance, by WCAG 2.2."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_the_standard_does() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(scheme: str) -> None:
    colours = palettes()[scheme]
    low = {
        f"{text} on {back}": round(contrast(colours[text], colours[back]), 2)
        for text, back in PAIRS
        if contrast(colours[text], colours[back]) < AA
    }
    assert low == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_and_columns_have_enough_contrast(scheme: str) -> None:
    colours = palettes()[scheme]
    low = [
        name
        for name in (f"k{number}" for number in range(NUM_COLOURS))
        if contrast(colours[name], colours["card"]) < DRAWN
    ]
    assert low == []


def test_outcomes_and_fates_have_distinct_colours() -> None:
    assert len(set(OUTCOME_COLOURS.values())) == len(OUTCOME_COLOURS)
    assert len(set(STATUS_COLOURS.values())) == len(STATUS_COLOURS)


def test_both_schemes_name_the_same_colours_and_no_other_is_used() -> None:
    names = [set(re.findall(r"--([a-z0-9-]+):", block)) for block in blocks()]
    assert names[0] == names[1]
    used = {name for style in STYLES for name in re.findall(r"var\(--([a-z0-9-]+)\)", style)}
    assert used - {"c"} <= names[0]
