"""The seams: what a rollout needs of a desktop, a policy engine and a store. Fakes for unit tests live in tests/."""

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
    """Provenance of the replica behind an episode."""

    replica_id: str
    provider: str
    image_digest: str
    grader_version: str


class Desktop(Protocol):
    """One episode's desktop, behind HTTP in practice. Each method raises EnvServerError, ReplicaError or SetupError
    when the environment is at fault."""

    async def reset(self, task: Task) -> tuple[Observation, DesktopInfo]: ...

    async def act(self, command: str, *, pause_s: float) -> Observation:
        """`command`: a pyautogui call, or WAIT, DONE, FAIL. A call the desktop refuses is ActionParseError."""
        ...

    async def score(self) -> float:
        """The grader's reward in 0..1. Raises EvaluatorError when the grader crashed."""
        ...

    async def close(self) -> None:
        """Idempotent; gives the replica back. Never raises."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """One turn of a conversation, for engines that take words instead of token ids."""

    role: Literal["system", "user", "assistant"]
    text: str
    images: tuple[bytes, ...] = ()
    """Encoded images, shown before the text."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    sampling: SamplingParams
    token_ids: tuple[int, ...] = ()
    """The whole prompt, image placeholders expanded; empty for an engine that takes turns."""
    images: tuple[bytes, ...] = ()
    """Encoded images in placeholder order."""
    turns: tuple[ChatTurn, ...] = ()
    """The same prompt as a conversation; filled for an engine that takes turns."""
    episode_id: str = ""
    """Requests of one episode in `append` mode extend each other: an engine may keep what it computed for the last.
    Empty: nothing is kept."""


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    text: str
    policy_version: int
    """Of the weights that sampled the first token."""
    finish_reason: str
    """stop | length | content_filter."""
    token_ids: tuple[int, ...] = ()
    """Sampled ids only, the end-of-turn token included where it was sampled; empty from an engine of words."""
    logprobs: tuple[float, ...] = ()
    """log p of each sampled token under the distribution that sampled it: softmax of logits / temperature without the
    banned ids (`Renderer.banned_ids`); at temperature 0 as at 1. Top-p is not in it: training samples at top-p 1."""
    policy_versions: tuple[int, ...] = ()
    """Of each sampled token; empty where all are `policy_version`."""
    prompt_num_tokens: int = 0
    """As an engine of words was billed for; 0 where it does not say, and from an engine of ids."""
    response_num_tokens: int = 0
    """Likewise."""


class PolicyEngine(Protocol):
    """Raises EngineError on failure or timeout, after the retries that its own budget allows."""

    name: str
    uses_chat_api: bool
    """It wants `GenerateRequest.turns` and answers words alone: no ids, no log-probabilities, so no training."""

    @property
    def policy_version(self) -> int: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        """Weights of a checkpoint folder; requests that wait or run meanwhile survive it."""
        ...

    async def forget(self, episode_id: str) -> None:
        """The episode is over: whatever was kept for it may go. Never raises."""
        ...

    async def health(self) -> None:
        """Raises EngineError, which says what to do, where the engine cannot answer."""
        ...

    async def close(self) -> None: ...


Documents = Mapping[str, Any] | Callable[[Path], Mapping[str, Any]]
"""JSON files to lay beside the weights, by name; a function gets the folder with the weights already in it."""


class PolicyTrainer(Protocol):
    """Optimises a policy on what was rolled out. Every method blocks: call it in a thread."""

    num_updates: int
    """Number of updates that produced these weights."""

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One update; returns its metrics. The weights do not change where nothing can be learned.

        Raises:
            TrainingError: trainer and sampler disagree, a loss is not finite, a trajectory is malformed.
        """
        ...

    def save(self, folder: Path, documents: Documents, *, then: Callable[[Path], object] | None = None) -> None:
        """Begins a checkpoint to `folder`, whole or not at all, which is written while training goes on; `then` is
        called with the folder once it is whole. One at a time: waits for the one before it.

        Raises:
            StoreError: the file system refused, this time or the last.
        """
        ...

    def wait_saved(self) -> None:
        """Until what was begun is whole. Raises StoreError."""
        ...

    def close(self) -> None: ...


class EpisodeSink(Protocol):
    """Where finished episodes go: each call is one atomic part; the same `part` name replaces, never duplicates."""

    def write_blob(self, data: bytes, *, suffix: str) -> str:
        """Stores an image once; returns its SHA-256."""
        ...

    def write_episodes(self, part: str, episodes: Sequence[Episode]) -> None: ...

    def write_groups(self, part: str, groups: Sequence[RolloutGroup], injections: Sequence[Injection]) -> None: ...
