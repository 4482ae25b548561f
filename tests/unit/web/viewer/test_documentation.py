"""What docs/viewer.md says about the viewer is true."""

import re
from pathlib import Path

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.web.pages import STATIC
from osworld_pipeline.web.viewer.filters import EpisodeFilter
from osworld_pipeline.web.viewer.index import EpisodeIndex
from osworld_pipeline.web.viewer.questions import Questions
from osworld_pipeline.web.viewer.settings import QUESTION_LIMIT_S

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs" / "viewer.md").read_text()


async def test_every_condition_that_the_page_shows_is_valid(sample_state: StateDir, sample_index: EpisodeIndex) -> None:
    questions = Questions(sample_state, sample_index)
    block = next(text for text in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) if "reward_parts" in text)
    conditions = block.strip().splitlines()
    assert len(conditions) == 3
    for condition in conditions:
        await questions.source(EpisodeFilter.from_query([("where", condition)]))
    assert f"stopped after {QUESTION_LIMIT_S:g} s" in PAGE


def test_every_option_and_key_that_is_named_exists() -> None:
    command = (ROOT / "osworld_pipeline" / "cli" / "view.py").read_text()
    parameters = re.findall(r"^    (\w+): ", command.split("def view(")[1], re.MULTILINE)
    options = {f"--{name.replace('_', '-')}" for name in parameters} | set(re.findall(r'"(--[a-z-]+)"', command))
    assert set(re.findall(r"(?<=[ `])--[a-z-]+", PAGE)) <= options
    script = (STATIC / "viewer.js").read_text()
    keys = set(re.findall(r"^  \"?([^\s\":]+)\"?: \(\) =>", script, re.MULTILINE))
    table = PAGE.split("## Keys")[1].split("## ")[0]
    names = {"←": "ArrowLeft", "→": "ArrowRight"}
    named = {
        names.get(key, key)
        for row in table.splitlines()
        for key in re.findall(r"`([^`]+)`", row.split("|")[1] if "|" in row else "")
    }
    assert named - {"Enter"} == keys
