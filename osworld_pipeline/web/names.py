"""Names of stages and outcomes for people, and the order of the stages."""

from collections.abc import Mapping

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.web.formats import words

STAGE_NAMES: Mapping[str, str] = {
    Stage.BASE: "Base",
    Stage.EXTERNAL: "External",
    Stage.SFT: "SFT",
    Stage.FLYWHEEL: "Flywheel",
    Stage.GSPO_PHASE1: "GSPO phase 1",
    Stage.GSPO_PHASE2: "GSPO phase 2",
}
_RANKS = {str(stage): rank for rank, stage in enumerate(Stage)}


def stage_name(stage: str | None) -> str:
    return STAGE_NAMES.get(stage or "", stage or "unknown")


def stage_rank(stage: str) -> int:
    """Its place in the order of training; unknown ones come last."""
    return _RANKS.get(stage, len(_RANKS))


def facet_value(value: str, facet: str) -> str:
    """A value of a facet of the list of episodes."""
    if facet == "stage":
        return stage_name(value)
    return words(value) if facet in ("outcome", "purpose") else value


def outcome_kind(outcome: str | None) -> str:
    """good, bad or fault: the colour of its badge."""
    if outcome == Outcome.SUCCESS:
        return "good"
    return "bad" if outcome in (Outcome.FAILURE, Outcome.TRUNCATED, Outcome.TAMPERING) else "fault"
