"""The section that says when the champion is trained further by itself, and what that may cost. The docstring under a
key is its documentation."""

from pydantic import Field

from osworld_pipeline.recipes.section import Section


class RetrainingSection(Section):
    """When the champion is trained further by itself, what one such run may spend, and when there is to be no other
    (docs/retraining.md). It is in no checkpoint's id."""

    min_new_successes: int = Field(default=100, ge=1)
    """New successes, by a grader's score, that make a re-training due: demonstrations that were verified and episodes
    of training, since the last one began."""
    patience: int = Field(default=2, ge=1)
    """After so many re-trainings of one champion that brought no new one, the next waits for new data."""
    max_wall_s: float = Field(default=28_800.0, gt=0)
    """From the beginning of the run; asked before each round of the flywheel and after each GSPO update."""
    max_episodes: int | None = Field(default=None, ge=1)
    """Episodes that a run may roll out; None for any number."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the policy may sample in a run; None for any number."""
