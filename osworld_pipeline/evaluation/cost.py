"""Cost of an evaluation's episodes and of a success. All episodes count, failures and faults too. If a figure is
missing for one episode, the total is unknown."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from osworld_pipeline.evaluation.scores import EvalRow


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of the last attempts; earlier attempts of a retried episode are not recorded."""

    num_episodes: int
    num_successes: int
    response_tokens: float | None
    """Sampled tokens; None if an engine did not count them. The next fields are None too if not measured."""
    prompt_tokens: float | None
    """Prompt tokens; a prompt counts at each turn."""
    wall_s: float | None
    """Sum over the episodes; they run in parallel, so the elapsed time is shorter."""
    desktop_s: float | None
    """Reset, step and evaluate."""
    model_s: float | None

    def per_success(self) -> "CostShare | None":
        """None without a success: its cost is unknown."""
        return self._divided(self.num_successes)

    def per_episode(self) -> "CostShare | None":
        """None without an episode."""
        return self._divided(self.num_episodes)

    def _divided(self, number: int) -> "CostShare | None":
        if number == 0:
            return None

        def share(total: float | None) -> float | None:
            return None if total is None else total / number

        return CostShare(
            response_tokens=share(self.response_tokens),
            prompt_tokens=share(self.prompt_tokens),
            wall_s=share(self.wall_s),
            desktop_s=share(self.desktop_s),
            model_s=share(self.model_s),
        )


@dataclass(frozen=True, kw_only=True)
class CostShare:
    """A share of a Cost, with the same fields."""

    response_tokens: float | None
    prompt_tokens: float | None
    wall_s: float | None
    desktop_s: float | None
    model_s: float | None


def total_cost(rows: Sequence[EvalRow]) -> Cost:
    def add(figure: Callable[[EvalRow], float | None]) -> float | None:
        return _sum(figure(row) for row in rows)

    return Cost(
        num_episodes=len(rows),
        num_successes=sum(row.is_success for row in rows),
        response_tokens=add(lambda row: row.response_tokens),
        prompt_tokens=add(lambda row: row.prompt_tokens),
        wall_s=add(lambda row: row.wall_s),
        desktop_s=add(lambda row: row.desktop_s),
        model_s=add(lambda row: row.model_s),
    )


def _sum(figures: Iterable[float | None]) -> float | None:
    total = 0.0
    for figure in figures:
        if figure is None:
            return None
        total += figure
    return total
