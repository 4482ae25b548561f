"""A trajectory: an episode, a demonstration or a replay row as the trainer sees it: tokens, mask, images, advantage."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    trajectory_id: str
    """The episode's id, or `replay:<row digest>`, or `demo:<row digest>`."""
    task_id: str
    token_ids: tuple[int, ...]
    """Prompt and response ids in the order the sampler saw them, image placeholders expanded."""
    response_mask: tuple[int, ...]
    """1 where the loss applies: tokens the policy sampled (or the demonstrator wrote)."""
    images: tuple[bytes, ...]
    """Encoded images, exactly as the model saw them, in placeholder order."""
    sampled_logprobs: tuple[float, ...] | None = None
    """Aligned with token_ids; None for replay and demonstrations."""
    advantage: float = 0.0
    weight: float = 1.0
    is_replay: bool = False

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.response_mask):
            raise ValueError(
                f"{self.trajectory_id}: {len(self.token_ids)} tokens, {len(self.response_mask)} mask entries"
            )
        if self.sampled_logprobs is not None and len(self.sampled_logprobs) != len(self.token_ids):
            raise ValueError(f"{self.trajectory_id}: sampled_logprobs and token_ids differ in length")
