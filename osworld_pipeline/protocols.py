"""The seams: what a rollout needs of a desktop, a policy engine and a store. Fakes for unit tests live in tests/."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from osworld_pipeline.domain.episode import Episode, SamplingParams
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.replay import Injection
from osworld_pipeline.domain.task import Task


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
class GenerateRequest:
    token_ids: tuple[int, ...]
    """The whole prompt, image placeholders expanded."""
    images: tuple[bytes, ...]
    """Encoded images in placeholder order."""
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    token_ids: tuple[int, ...]
    """Sampled ids only, the end-of-turn token included where it was sampled."""
    logprobs: tuple[float, ...]
    """log p of each sampled token under the unscaled logits (temperature 1, no top-p): what a trainer recomputes."""
    text: str
    policy_version: int
    finish_reason: str
    """stop | length."""


class PolicyEngine(Protocol):
    """Raises EngineError on failure or timeout."""

    name: str

    @property
    def policy_version(self) -> int: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...

    async def load_weights(self, path: Path, *, policy_version: int) -> None: ...

    async def close(self) -> None: ...


class EpisodeSink(Protocol):
    """Where finished episodes go: each call is one atomic part; the same `part` name replaces, never duplicates."""

    def write_blob(self, data: bytes, *, suffix: str) -> str:
        """Stores an image once; returns its SHA-256."""
        ...

    def write_episodes(self, part: str, episodes: Sequence[Episode]) -> None: ...

    def write_groups(self, part: str, groups: Sequence[RolloutGroup], injections: Sequence[Injection]) -> None: ...
