"""Every pair of colours that text is set in has the contrast that WCAG asks for at level AA, light and dark."""

import re

import pytest

from osworld_pipeline.web.pages import STATIC

AA = 4.5
PAIRS = [
    *((text, back) for text in ("ink", "quiet", "accent") for back in ("paper", "card")),
    *((text, back) for text in ("good", "bad", "fault") for back in ("paper", "card", f"{text}-back")),
    *(("ink", back) for back in ("screen", "chosen", "t1", "t2", "t3", "t4")),
    *(("quiet", back) for back in ("screen", "chosen")),
    ("accent", "chosen"),
    ("bad", "chosen"),
    ("fault", "chosen"),
]


def palettes() -> dict[str, dict[str, str]]:
    css = (STATIC / "viewer.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    found = [dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block)) for block in (light, dark)]
    return {"light": found[0], "dark": found[0] | found[1]}


def luminance(colour: str) -> float:
    """Relative, by WCAG 2.2."""
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
def test_text_can_be_read(scheme: str) -> None:
    colours = palettes()[scheme]
    low = {
        f"{text} on {back}": round(contrast(colours[text], colours[back]), 2)
        for text, back in PAIRS
        if contrast(colours[text], colours[back]) < AA
    }
    assert low == {}


def test_both_schemes_name_the_same_colours() -> None:
    css = (STATIC / "viewer.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    names = [set(re.findall(r"--([a-z0-9-]+):", block)) for block in (light, dark)]
    assert names[0] == names[1]
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", css)) <= names[0]
