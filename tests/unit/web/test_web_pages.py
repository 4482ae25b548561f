"""What every report shares: it loads and runs nothing, and is built from the parts of the viewer's pages."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from osworld_pipeline.web.pages import SHARED_STYLE, STATIC, render

TEMPLATES = STATIC.parent / "templates"
REPORTS = [path for path in sorted((TEMPLATES / "reports").glob("*.jinja")) if path.name != "file.html.jinja"]


def test_a_report_may_load_and_run_nothing() -> None:
    html = render("reports/index.html.jinja", groups={}, written_at="now")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1] == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert "<script" not in html
    assert "<link" not in html
    assert "url(" not in html
    assert 'lang="en"' in html
    assert "width=device-width" in html


def test_the_style_of_a_report_is_the_one_that_the_viewer_serves() -> None:
    html = render("reports/index.html.jinja", groups={}, written_at="now")
    page = render("viewer/login.html.jinja", problem="", to="/")
    for name in SHARED_STYLE:
        assert (STATIC / name).read_text() in html
        assert f"/static/{name}?v=" in page
    assert html.count("</style") == 1


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.name)
def test_headings_of_a_report_step_down_one_at_a_time(path: Path) -> None:
    levels = [int(level) for level in re.findall(r"<h([1-6])", path.read_text())]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_template_is_the_base_or_extends_it_or_is_a_part_of_others() -> None:
    paths = {str(path.relative_to(TEMPLATES)): path.read_text() for path in TEMPLATES.rglob("*.jinja")}
    bases = {name: found[1] for name, text in paths.items() if (found := re.match(r'\{% extends "(.*?)" %\}', text))}
    assert [name for name, text in paths.items() if "<!doctype" in text] == ["base.html.jinja"]
    assert set(bases.values()) <= set(paths)
    named = set(re.findall(r'"([a-z_/]+\.html\.jinja)"', "".join(paths.values())))
    alone = {name for name, text in paths.items() if not text.startswith("{% extends")} - named
    assert alone == set()
