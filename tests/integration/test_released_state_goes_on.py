"""This version continues with a released version's state: its checkpoint is evaluated on real desktops, without and
after a migration."""

from pathlib import Path

import pytest
from command_runs import LIMIT_S, answer, run, with_instance_settings
from released_states import VERSIONS, unpack
from states.make import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.desktop, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_of_a_released_version_is_evaluated_and_the_state_maintained(version: str, tmp_path: Path) -> None:
    here = with_instance_settings(tmp_path)
    unpack(version, here / "var")
    count = ("query", "SELECT count(*) AS n FROM evals WHERE checkpoint_id LIKE 'base-%'")
    (base,) = [row["checkpoint_id"] for row in answer(here, "query", "FROM checkpoints WHERE stage = 'base'")]
    (before,) = answer(here, *count)
    recorded = answer(here, "evaluate", *RECIPE, "--checkpoint", base, "--seeds", "1")
    assert recorded["num_valid"] == 2
    assert answer(here, *count) == [before], "the released version has recorded these episodes"
    new = answer(here, "evaluate", *RECIPE, "--checkpoint", base, "--seeds", "2")
    assert new["num_valid"] == 2
    assert answer(here, *count) == [{"n": before["n"] + 2}]
    planned = answer(here, "migrate", "--dry-run")
    assert {**answer(here, "migrate"), "is_dry_run": True} == planned
    assert answer(here, "migrate")["is_due"] is False
    assert "nothing to change" in run(here, "migrate").stdout
    assert answer(here, "evaluate", *RECIPE, "--checkpoint", base, "--seeds", "3")["num_valid"] == 2
    assert answer(here, "compact", "--min-parts", "1")["num_written"] > 0
    assert answer(here, *count) == [{"n": before["n"] + 4}]
