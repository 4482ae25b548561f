"""The part of a recipe that determines the weights of a stage: its sections, without the keys marked NOT_LEARNED."""

from collections.abc import Mapping
from typing import Any

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.recipes.keys import sections
from osworld_pipeline.recipes.section import IN_TINY_TOKENIZER, NOT_LEARNED

_GSPO = ("gspo", "replay", "rollout", "trainer", "agent", "reward", "desktop")
SECTIONS: dict[Stage, tuple[str, ...]] = {
    Stage.BASE: ("model",),
    Stage.EXTERNAL: (),
    Stage.SFT: ("sft", "trainer", "agent"),
    Stage.FLYWHEEL: ("flywheel", "sft", "trainer", "agent", "desktop"),
    Stage.GSPO_PHASE1: _GSPO,
    Stage.GSPO_PHASE2: _GSPO,
}
"""The sections that a stage's weights depend on, in addition to the parent and the data."""


def learned_by(stage: Stage, dumped: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that determine the result of `stage`. `dumped`: a whole recipe as JSON."""
    params = {name: learned_keys(name, dumped[name]) for name in SECTIONS[stage]}
    if stage is Stage.BASE and dumped["model"]["kind"] == "tiny":
        params |= {
            name: {key: dumped[name][key] for key in keys}
            for name, section in sections()
            if (keys := section.keys_with(IN_TINY_TOKENIZER))
        }
    if stage is Stage.FLYWHEEL:
        params["sft"].pop("num_updates")  # a round has its own
    other = {Stage.GSPO_PHASE1: "phase2", Stage.GSPO_PHASE2: "phase1"}.get(stage)
    if other is not None:
        params["gspo"].pop(other)
    return params


def learned_keys(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` of a section, without the keys that do not change what is learned."""
    left_out = {key for other, section in sections() if other == name for key in section.keys_with(NOT_LEARNED)}
    return {key: value for key, value in values.items() if key not in left_out}
