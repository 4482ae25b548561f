"""The job of a stage of supervised fine-tuning."""

from osworld_pipeline.recipes.schema import SftSection
from osworld_pipeline.runs.job import TrainingJob


class SftJob(TrainingJob):
    @property
    def settings(self) -> SftSection:
        return self.recipe.sft

    @property
    def num_planned(self) -> int:
        return self.settings.num_updates
