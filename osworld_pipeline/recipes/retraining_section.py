"""The section for automatic re-training of the champion, and its budget. The docstring under a key is its
documentation."""

from pydantic import Field

from osworld_pipeline.recipes.section import Section


class RetrainingSection(Section):
    """When the champion is re-trained automatically, the budget of one run, and when re-training stops
    (docs/retraining.md). This section is not part of any checkpoint's id."""

    min_new_successes: int = Field(default=100, ge=1)
    """Number of new graded successes that trigger a re-training: verified demonstrations and training episodes since
    the last one began."""
    patience: int = Field(default=2, ge=1)
    """After this number of re-trainings of one champion without a new champion, the next one waits for new data, or for
    `min_new_successes` successes of other runs."""
    max_wall_s: float = Field(default=28_800.0, gt=0)
    """Time limit from the start of the run; checked before each round of the flywheel, before each GSPO phase and after
    each GSPO update."""
    max_episodes: int | None = Field(default=None, ge=1)
    """Maximum number of episodes of a run; None: no limit."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens sampled in a run; None: no limit."""
