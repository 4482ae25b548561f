"""The interfaces of desktops, policy engines and stores for rollouts. Fakes for unit tests are in tests/."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from osworld_pipeline.domain.episode import Episode, SamplingParams
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.replay import Injection
from osworld_pipeline.domain.task import Task
from osworld_pipeline.domain.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class DesktopInfo:
    """Provenance of the replica of an episode."""

    replica_id: str
    provider: str
    image_digest: str
    grader_version: str


class Desktop(Protocol):
    """One episode's desktop, behind HTTP in practice. Each method except `close` raises EnvServerError, ReplicaError or
    SetupError when the environment is at fault; `reset` raises TaskError if the task is refused."""

    async def reset(self, task: Task, *, record_id: str = "") -> tuple[Observation, DesktopInfo]:
        """`record_id`: the id under which the episode will be stored, for people who watch."""
        ...

    async def act(self, command: str, *, pause_s: float, note: str = "") -> Observation:
        """`command`: a pyautogui call, or WAIT, DONE, FAIL; `note`: what the policy said, for people who watch. Raises
        ActionParseError for a call that the desktop refuses."""
        ...

    async def score(self) -> float:
        """The grader's reward in 0..1. Raises EvaluatorError when the grader crashed, TouchedError when a person sent
        input to the desktop."""
        ...

    async def close(self) -> None:
        """Releases the replica. Idempotent; does not raise."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """One turn of a conversation, for engines that use text instead of token ids."""

    role: Literal["system", "user", "assistant"]
    text: str
    images: tuple[bytes, ...] = ()
    """Encoded images, placed before the text."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    sampling: SamplingParams
    token_ids: tuple[int, ...] = ()
    """The whole prompt, with image placeholders expanded; empty for a chat engine."""
    images: tuple[bytes, ...] = ()
    """Encoded images in placeholder order."""
    turns: tuple[ChatTurn, ...] = ()
    """The same prompt as a conversation; only for a chat engine."""
    episode_id: str = ""
    """Each request of an episode extends the previous one in `append` mode, so an engine may cache its state by this
    id. Empty: no cache."""


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    text: str
    policy_version: int
    """Version of the weights that sampled the first token."""
    finish_reason: str
    """stop | length | content_filter."""
    token_ids: tuple[int, ...] = ()
    """Sampled ids only, including a sampled end-of-turn token; empty from a chat engine."""
    logprobs: tuple[float, ...] = ()
    """log p of each sampled token under the distribution that sampled it: softmax of logits / temperature without the
    banned ids (`Renderer.banned_ids`); temperature 0 counts as 1. Top-p is ignored: training samples at top-p 1."""
    policy_versions: tuple[int, ...] = ()
    """Version of each sampled token; empty if all are `policy_version`."""
    prompt_num_tokens: int = 0
    """Prompt tokens that a chat engine reports; 0 if unknown, and from a token engine."""
    response_num_tokens: int = 0
    """Likewise for the response."""


class PolicyEngine(Protocol):
    """An engine raises EngineError on failure or timeout, after the retries of its own budget."""

    name: str
    uses_chat_api: bool
    """A chat engine: it needs `GenerateRequest.turns` and returns only text, without ids and log-probabilities, so it
    cannot be used in training."""

    @property
    def policy_version(self) -> int: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        """Loads weights from a checkpoint folder; waiting and running requests continue."""
        ...

    async def forget(self, episode_id: str) -> None:
        """Drops the cached state of a finished episode. Does not raise."""
        ...

    async def health(self) -> None:
        """Raises EngineError, with a remedy, if the engine does not respond."""
        ...

    async def close(self) -> None: ...


Documents = Mapping[str, Any] | Callable[[Path], Mapping[str, Any]]
"""JSON files to write next to the weights, by name; a function receives the folder with the weights already in it."""


class PolicyTrainer(Protocol):
    """Optimises a policy on rollouts. Every method blocks: call it in a thread."""

    num_updates: int
    """Number of updates that produced these weights."""

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One update; returns its metrics. The weights do not change without a training signal, or if the update is
        held (`gspo.min_effective_share`).

        Raises:
            TrainingError: trainer and sampler disagree, a loss is not finite, a trajectory is malformed.
        """
        ...

    def save(self, folder: Path, documents: Documents, *, then: Callable[[Path], object] | None = None) -> None:
        """Starts to save a checkpoint to `folder`, atomically and in the background; `then` is called with the folder
        when it is complete. One at a time: waits for the previous one.

        Raises:
            StoreError: the file system refused, this time or the last.
        """
        ...

    def wait_saved(self) -> None:
        """Waits until the started checkpoint is complete. Raises StoreError."""
        ...

    def close(self) -> None: ...


class EpisodeSink(Protocol):
    """The sink for finished episodes: each call writes one atomic part, which replaces a part with the same name."""

    def write_blob(self, data: bytes, *, suffix: str) -> str:
        """Stores an image once; returns its SHA-256."""
        ...

    def write_episodes(self, part: str, episodes: Sequence[Episode]) -> None: ...

    def write_groups(self, part: str, groups: Sequence[RolloutGroup], injections: Sequence[Injection]) -> None: ...
