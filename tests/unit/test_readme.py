"""What the README shows agrees with the code."""

import argparse
import re
from pathlib import Path

from env_server.options import add_server_options
from env_server.server_settings import ServerSettings
from osworld_pipeline.tables.questions.examples import BEST_EPISODE_SCREENSHOTS, INJECTED_REPLAY_ROWS

ROOT = Path(__file__).resolve().parents[2]
README, TOUR = ((ROOT / name).read_text() for name in ("README.md", "docs/tour.md"))


def test_the_tour_shows_the_two_queries_as_they_are_tested() -> None:
    assert BEST_EPISODE_SCREENSHOTS in TOUR
    assert INJECTED_REPLAY_ROWS in TOUR


def test_readme_names_both_commands_and_shows_a_real_run() -> None:
    assert "make demo" in README
    assert "make test" in README
    assert "Success on held-out tasks" in README


def test_every_option_of_the_env_server_that_its_readme_names_exists():
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    known |= set(re.findall(r'"(--[a-z-]+)"', (ROOT / "env_server/osgym_workers.py").read_text()))
    text = (ROOT / "env_server/README.md").read_text()
    blocks = [line for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    commands = [line.partition("#")[0] for line in blocks if "env-server " in line.partition("#")[0]]
    named = {option for line in commands for option in re.findall(r"(?<=\s)--[a-z-]+", line)}
    named |= set(re.findall(r"`(--[a-z-]+)", text))
    assert len(commands) >= 8
    assert {"--replicas", "--provider", "--open-network"} <= named
    assert named - known - {"--help"} == set()


def test_every_limit_that_the_env_servers_readme_explains_is_a_setting_with_that_default():
    rows = re.findall(
        r"^\| (`[a-z_.`, ]+`) \| ([\d.,]+)( s| MiB)? \|", (ROOT / "env_server/README.md").read_text(), re.M
    )
    assert len(rows) >= 9
    for names, default, unit in rows:
        values = [float(part.replace(",", "")) for part in re.findall(r"[\d.]+", default)]
        for index, name in enumerate(re.findall(r"[a-z_.]+", names)):
            value: object = ServerSettings()
            for part in name.split("."):
                value = getattr(value, part)
            scale = 2**20 if unit == " MiB" else 1
            assert value == values[min(index, len(values) - 1)] * scale, name
