"""The base of every part of a recipe: frozen, without unknown keys, with a docstring for each key."""

from enum import Enum, auto

from pydantic import BaseModel, ConfigDict

from osworld_pipeline.domain.digest import digest_json


class Mark(Enum):
    """A mark of a key, in its annotation: `num_replicas: Annotated[int, NOT_LEARNED] = 2`."""

    NOT_LEARNED = auto()
    """Does not change the weights that a stage makes from its parent and its data, so it is in no checkpoint's id. All
    other keys are in the ids of the stages that depend on their section."""
    IN_TINY_TOKENIZER = auto()
    """Determines the tokenizer of a tiny model (runs/base/make_base.py); a published model has its own."""


NOT_LEARNED, IN_TINY_TOKENIZER = Mark.NOT_LEARNED, Mark.IN_TINY_TOKENIZER


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def keys_with(cls, mark: Mark) -> tuple[str, ...]:
        return tuple(name for name, field in cls.model_fields.items() if mark in field.metadata)

    @property
    def digest(self) -> str:
        return digest_json(self.model_dump(mode="json"))
