"""An engine that reads its answers from scripts. With a suite's oracles it solves tasks in episodes like those of any
policy. It returns only text."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult


class ScriptedEngine:
    name = "scripted"
    uses_chat_api = True
    policy_version = 0

    def __init__(self, scripts: Mapping[str, Sequence[str]]) -> None:
        """`scripts`: the answers of an episode in order, by its planned id; each attempt starts from the first."""
        self._scripts = scripts
        self._num_said: dict[str, int] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        attempt_id = request.episode_id
        planned_id, _, _ = attempt_id.rpartition("-a")
        index = self._num_said.get(attempt_id, 0)
        script = self._scripts.get(planned_id, ())
        if index >= len(script):
            raise EngineError(f"the script of {planned_id or attempt_id} has no answer for turn {index}")
        self._num_said[attempt_id] = index + 1
        return GenerateResult(text=script[index], policy_version=self.policy_version, finish_reason="stop")

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        raise EngineError(f"scripts have no weights: {path} is not loaded")

    async def forget(self, episode_id: str) -> None:
        self._num_said.pop(episode_id, None)

    async def health(self) -> None:
        """Always succeeds."""

    async def close(self) -> None:
        """Has no resources."""
