"""What the README shows is what the code has."""

from pathlib import Path

from osworld_pipeline.tables.examples import BEST_EPISODE_SCREENSHOTS, INJECTED_REPLAY_ROWS

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_readme_shows_the_two_queries_as_they_are_tested() -> None:
    assert BEST_EPISODE_SCREENSHOTS in README
    assert INJECTED_REPLAY_ROWS in README


def test_readme_names_both_commands_and_shows_a_real_run() -> None:
    assert "make demo" in README
    assert "make test" in README
    assert "Success on held-out tasks" in README
