"""The training reward, computed from the grader's score and the course of the episode, in 0..1:

slime    clamp(task + alpha * partial - penalties, 0, 1), which is Slime-OSWorld's
bounded  task, if it reaches the threshold; else base + (threshold - base) * min(alpha, 1) * process, and always
         below the threshold. base: task if partial_tasks, else 0; process: clamp(partial - penalties, 0, 1)
none     task

Under `bounded` a failure never gets as much as a success, and at equal `process` a higher score of the grader never
gets a lower reward. All of them are deterministic functions of recorded values.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

from osworld_pipeline.domain.episode import Reward, StepSignals
from osworld_pipeline.recipes.schema import RewardSection

EXPECTED_STEPS = {"low": (2, 5), "medium": (5, 12), "high": (10, 25)}
MODALITIES = ("click", "type", "key", "scroll", "drag", "wait")


def shape_reward(
    task_reward: float, steps: Sequence[StepSignals], *, max_steps: int, section: RewardSection, has_a11y_tree: bool
) -> Reward:
    """Raw and shaped reward of a graded episode."""
    terms = partial_terms(steps, max_steps=max_steps, complexity=section.complexity)
    partial = partial_score(terms, section=section, has_a11y_tree=has_a11y_tree)
    penalties = penalty_terms(steps)
    penalty = sum(penalties.values())
    shaped = _SHAPINGS[section.shaping](task_reward, partial, penalty, section)
    return Reward(task=task_reward, partial=partial, penalty=penalty, shaped=shaped, parts=terms | penalties)


def _slime(task: float, partial: float, penalty: float, section: RewardSection) -> float:
    return _clamp(task + section.alpha * partial - penalty)


def _bounded(task: float, partial: float, penalty: float, section: RewardSection) -> float:
    threshold = section.success_threshold
    if task >= threshold:
        return task
    base = max(0.0, task) if section.partial_tasks else 0.0
    share = min(section.alpha, 1.0) * _clamp(partial - penalty)
    return min(base + (threshold - base) * share, math.nextafter(threshold, 0.0))


def _none(task: float, partial: float, penalty: float, section: RewardSection) -> float:
    return task


_SHAPINGS = {"slime": _slime, "bounded": _bounded, "none": _none}


def _clamp(value: float) -> float:
    return min(1.0, max(0.0, value))


def partial_terms(steps: Sequence[StepSignals], *, max_steps: int, complexity: str) -> dict[str, float]:
    """The process terms, each in 0..1, by the names of their weights."""
    return {
        "action_parse_valid": _share([step.action_parsed for step in steps]),
        "action_executed": _share([step.action_executed for step in steps]),
        "a11y_grounding": _share([step.a11y_grounded for step in steps]),
        "tool_calling": tool_calling(steps, complexity=complexity),
        "efficiency": efficiency(len(steps), max_steps=max_steps),
        "screen_change": _share([step.screen_changed for step in steps]),
        "a11y_change": _share([step.a11y_changed for step in steps]),
        "terminal_change": _share([step.terminal_changed for step in steps]),
    }


def partial_score(terms: Mapping[str, float], *, section: RewardSection, has_a11y_tree: bool) -> float:
    """The weighted sum of the process terms."""
    # The weights are not modified: an episode without a tree must not change the section for the next.
    return sum(
        getattr(section, name) * value
        for name, value in terms.items()
        if has_a11y_tree or name not in ("a11y_grounding", "a11y_change")
    )


def efficiency(num_steps: int, *, max_steps: int) -> float:
    """The unused share of the step budget; 1 for no steps."""
    if num_steps == 0:
        return 1.0
    return max(0.0, (max_steps - num_steps) / max_steps)


def tool_calling(steps: Sequence[StepSignals], *, complexity: str) -> float:
    """0.4 diversity + 0.4 complexity + 0.2 modality, over the steps whose action was parsed."""
    types = [step.action_type for step in steps if step.action_parsed]
    if not types:
        return 0.0
    diversity = min(1.0, len(set(types)) / 3)
    low, high = EXPECTED_STEPS[complexity]
    if len(types) < low:
        fit = len(types) / low
    elif len(types) > high:
        fit = max(0.5, high / len(types))
    else:
        fit = 1.0
    modality = min(1.0, sum(any(name in action for action in types) for name in MODALITIES) / 2)
    return 0.4 * diversity + 0.4 * fit + 0.2 * modality


def penalty_terms(steps: Sequence[StepSignals]) -> dict[str, float]:
    """Penalties for repetition and unparsable actions (both from two steps on), fallbacks and waits."""
    num_steps = len(steps)
    if num_steps == 0:
        return {}
    terms = {
        "penalty_fallback": min(0.5, 0.5 * sum(step.fallback_used for step in steps) / num_steps),
        "penalty_wait": min(0.3, 0.3 * sum(step.action_type == "wait" for step in steps) / num_steps),
    }
    if num_steps >= 2:
        repeats = sum(
            (step.action_type, step.coordinate) == (before.action_type, before.coordinate)
            for before, step in itertools.pairwise(steps)
        )
        terms["penalty_repetition"] = min(0.30, 0.40 * repeats / num_steps)
        unknown = sum(step.action_type == "unknown" for step in steps)
        terms["penalty_invalid"] = min(0.15, 0.30 * unknown / num_steps)
    return terms


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0
