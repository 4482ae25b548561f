"""The base of every part of a recipe: frozen, without unknown keys, with a docstring for each key."""

from pydantic import BaseModel, ConfigDict

from osworld_pipeline.domain.digest import digest_json


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @property
    def digest(self) -> str:
        return digest_json(self.model_dump(mode="json"))
