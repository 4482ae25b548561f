"""Hand-written rows of `evals`, for tests of what is computed from them."""

from collections.abc import Iterable, Mapping

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.evaluation.scores import EvalRow

KEY = "0123456789ab"
LETTERS = {
    "s": Outcome.SUCCESS,
    "f": Outcome.FAILURE,
    "t": Outcome.TRUNCATED,
    "o": Outcome.TIMEOUT,
    "e": Outcome.ENV_FAULT,
    "g": Outcome.GRADER_FAULT,
    "p": Outcome.TOUCHED,
}


def eval_row(outcome: Outcome, **changes) -> EvalRow:
    """One row of checkpoint `c`, task `t` and no evaluation in particular."""
    is_valid = outcome.is_valid
    fields = {
        "checkpoint_id": "c", "stage": "sft", "task_id": "t", "seed": 0, "family": "f", "suite": "s",
        "outcome": str(outcome), "success": outcome is Outcome.SUCCESS if is_valid else None,
        "shaped_reward": 0.5 if is_valid else None, "turns": 2, "max_turns": 5, "episode_id": "e",
        "provider": "local", "image_digest": "i", "grader_version": "g", "temperature": 0.0,
    }  # fmt: skip
    return EvalRow(**(fields | changes))


def eval_rows(played: Mapping[str, str] | Iterable[str], *, checkpoint: str = "c", key: str = KEY, **changes):
    """One row for each letter (see LETTERS), each with its own seed. `played`: by task, or of tasks a, b, c, ..."""
    tasks = played if isinstance(played, Mapping) else dict(zip("abcdefghijklmnop", played, strict=False))
    return [
        eval_row(
            LETTERS[letter], checkpoint_id=checkpoint, stage_key=f"eval-{checkpoint}-{key}", task_id=task, seed=seed,
            episode_id=f"{checkpoint}-{task}-{seed}", **changes,
        )
        for task, letters in tasks.items()
        for seed, letter in enumerate(letters)
    ]  # fmt: skip
