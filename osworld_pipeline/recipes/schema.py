"""The schema of a recipe: its sections with their keys, and their invalid combinations. Unknown keys and contradictions
are refused on load; there are no aliases."""

from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from osworld_pipeline.recipes.contradictions import first_contradiction
from osworld_pipeline.recipes.episode_sections import (
    AgentSection,
    DesktopSection,
    EngineSection,
    EvaluationSection,
    LaunchSection,
    RewardSection,
    RolloutSection,
    SuiteSection,
)
from osworld_pipeline.recipes.retraining_section import RetrainingSection
from osworld_pipeline.recipes.section import Section
from osworld_pipeline.recipes.training_sections import (
    FlywheelSection,
    GspoPhaseSection,
    GspoSection,
    GspoSharedSection,
    LoraSection,
    PretrainedModelSection,
    ReplaySection,
    SftSection,
    TinyModelSection,
    TrainerSection,
)

__all__ = [
    "AgentSection",
    "DesktopSection",
    "EngineSection",
    "EvaluationSection",
    "FlywheelSection",
    "GspoPhaseSection",
    "GspoSection",
    "GspoSharedSection",
    "LaunchSection",
    "LoraSection",
    "PretrainedModelSection",
    "Recipe",
    "ReplaySection",
    "RetrainingSection",
    "RewardSection",
    "RolloutSection",
    "Section",
    "SftSection",
    "SuiteSection",
    "TinyModelSection",
    "TrainerSection",
]


class Recipe(Section):
    """A whole run."""

    name: str
    """Name of the file, without its suffix."""
    sources: Mapping[str, str] = {}
    """The source of each value that is not the schema's default, as in recipes/load.py. Set by the loader, so that it
    is saved with the recipe in every checkpoint; not valid in a file."""
    suite: SuiteSection = SuiteSection()
    desktop: DesktopSection = DesktopSection()
    model: TinyModelSection | PretrainedModelSection = Field(discriminator="kind")
    agent: AgentSection = AgentSection()
    engine: EngineSection = EngineSection()
    reward: RewardSection = RewardSection()
    trainer: TrainerSection = TrainerSection()
    sft: SftSection
    rollout: RolloutSection = RolloutSection()
    gspo: GspoSection
    replay: ReplaySection = ReplaySection()
    flywheel: FlywheelSection = FlywheelSection()
    evaluation: EvaluationSection = EvaluationSection()
    retraining: RetrainingSection = RetrainingSection()

    @property
    def env_request_timeout_s(self) -> float:
        """Timeout of one request to an env server."""
        return self.desktop.request_timeout_s or self.gspo.turn_timeout_s

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sentence = first_contradiction(self)
        if sentence is not None:
            raise ValueError(sentence)
        return self
