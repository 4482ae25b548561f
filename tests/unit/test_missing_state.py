"""Commands that read a state say in one sentence that its folder does not exist, and do not make it."""

from pathlib import Path

import pytest

from osworld_pipeline.errors import StoreError

"""Typer imports what a later click will not have."""

READING = (
    ("query", "SELECT 1"),
    ("view", "--port", "0"),
    ("report",),
    ("checkpoint", "list"),
    ("lineage", "episode"),
    ("cookbook", "solved-only-with-replay"),
    ("compact",),
    ("collect-garbage",),
    ("missing-images",),
    ("rebuild-catalog",),
    ("export", "slime", "output"),
)


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
def test_a_state_folder_that_does_not_exist_is_an_error_and_is_not_made(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osworld_pipeline.cli import app

    monkeypatch.chdir(tmp_path)
    missing = tmp_path / "missing"
    with pytest.raises(StoreError, match=f"there is no state folder {missing}"):
        app([*command, "--state", str(missing)], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []
