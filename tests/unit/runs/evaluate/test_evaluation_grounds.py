"""An evaluation that continues after desktops or graders have changed: what others graded runs again, so that no score
mixes two graders."""

from typing import Any

import pytest
from episode_samples import make_episode

from osworld_pipeline.domain.grounds import Grounds, has_other_grounds
from osworld_pipeline.runs.evaluate.evaluate import on_other_grounds

OLD, NEW = (Grounds(image_digest="i" * 64, grader_version=version) for version in ("7", "8"))
FINISHED = {
    "old": make_episode("old", image_digest=OLD.image_digest, grader_version="7"),
    "new": make_episode("new", image_digest=NEW.image_digest, grader_version="8"),
    "unknown": make_episode("unknown"),
}


def asked(grounds: frozenset[Grounds] | None) -> tuple[frozenset[str], list[str]]:
    warned: list[Any] = []
    again = on_other_grounds(FINISHED, grounds, warned.append)
    return again, [one.message for one in warned]


def test_episodes_that_another_grader_graded_run_again_and_this_is_reported() -> None:
    again, (message,) = asked(frozenset({NEW}))
    assert again == {"old"}
    assert message == "1 episodes were graded on another desktop image or by another grader: they run again"


def test_servers_that_differ_are_named_and_nothing_runs_again() -> None:
    again, (message,) = asked(frozenset({OLD, NEW}))
    assert again == frozenset()
    assert "iiiiiiiiiiii/grader 7; iiiiiiiiiiii/grader 8" in message
    assert message.endswith("this evaluation will have no rank")


def test_servers_that_do_not_report_their_grounds_change_nothing() -> None:
    assert asked(None) == (frozenset(), [])


@pytest.mark.parametrize(("name", "is_other"), [("old", True), ("new", False), ("unknown", False)])
def test_grounds_are_compared_as_far_as_they_are_known(name: str, is_other: bool) -> None:
    assert has_other_grounds(FINISHED[name], {NEW}) == is_other
    assert not has_other_grounds(FINISHED[name], None)
