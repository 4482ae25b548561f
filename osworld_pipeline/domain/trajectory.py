"""A trajectory: a sequence of an episode, a demonstration or a replay row as the trainer sees it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import overload


class LazyImages(Sequence[bytes]):
    """Images by SHA-256, each read on access; equal to any sequence of the same bytes."""

    def __init__(self, read: Callable[[str], bytes], sha256s: Iterable[str]) -> None:
        self._read = read
        self.sha256s = tuple(sha256s)

    def __len__(self) -> int:
        return len(self.sha256s)

    def __iter__(self) -> Iterator[bytes]:
        return map(self._read, self.sha256s)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return LazyImages(self._read, self.sha256s[index])
        return self._read(self.sha256s[index])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyImages):
            return self.sha256s == other.sha256s
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self.sha256s)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    trajectory_id: str
    """The episode's id (`<episode>#<turn>` in `window` mode), or `replay:<row id>` (in a batch after `<group>/`), or
    `demo:<row id>`, likewise with the turn."""
    task_id: str
    token_ids: tuple[int, ...]
    """Prompt and response ids in the order the sampler saw them, image placeholders expanded."""
    response_mask: tuple[int, ...]
    """1 for tokens with a loss: those the policy sampled (or the demonstrator wrote)."""
    images: Sequence[bytes]
    """Encoded images, exactly as the model saw them, in placeholder order; often read on access."""
    sampled_logprobs: tuple[float, ...] | None = None
    """Aligned with token_ids, like `GenerateResult.logprobs`; None for replay and demonstrations."""
    policy_versions: tuple[int, ...] | None = None
    """Aligned with token_ids, -1 outside the mask: number of updates of the weights that sampled the token."""
    temperature: float = 1.0
    """Logits are divided by it: the sampling temperature, or 1 if that is 0; for replay, that of the phase that it
    joins."""
    advantage: float = 0.0
    weight: float = 1.0
    """Weight of its episode in the loss. `gspo.turn_weight` decides how an episode's sequences share it."""
    is_replay: bool = False
    is_canary: bool = False
    """Sampled with the trainer's current weights for comparison; not trained on."""

    @property
    def episode_id(self) -> str:
        """`<episode>#<turn>` is one sequence of an episode in `window` mode."""
        return self.trajectory_id.partition("#")[0]

    @property
    def num_response_tokens(self) -> int:
        return sum(self.response_mask)

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.response_mask):
            raise ValueError(
                f"{self.trajectory_id}: {len(self.token_ids)} tokens and {len(self.response_mask)} mask entries"
            )
        if self.sampled_logprobs is not None and len(self.sampled_logprobs) != len(self.token_ids):
            raise ValueError(f"{self.trajectory_id}: sampled_logprobs and token_ids differ in length")


def with_held_images(trajectories: Iterable[Trajectory]) -> tuple[Trajectory, ...]:
    """The same with their images in memory, each distinct one once, to be sent to another process."""
    held: dict[str, bytes] = {}

    def hold(images: Sequence[bytes]) -> tuple[bytes, ...]:
        if isinstance(images, LazyImages):
            return tuple(
                held[key] if key in held else held.setdefault(key, images[index])
                for index, key in enumerate(images.sha256s)
            )
        return tuple(held.setdefault(sha256(image).hexdigest(), image) for image in images)

    return tuple(replace(trajectory, images=hold(trajectory.images)) for trajectory in trajectories)
