"""DesktopEnv as used by Slime-OSWorld's server: a step sleeps 50 ms and returns the same 20 KB picture as our stub."""

import time
from typing import Any

from benchmarks.stub_step import SCREENSHOT, STEP_S


class DesktopEnv:
    def __init__(self, **_: Any) -> None:
        self._instruction = ""

    def reset(self, task_config: dict[str, Any]) -> dict[str, Any]:
        self._instruction = task_config.get("instruction", "")
        return self._observation()

    def step(self, action: str, pause: float = 2) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        time.sleep(STEP_S)
        return self._observation(), 0.0, False, {}

    def evaluate(self) -> float:
        return 0.0

    def close(self) -> None: ...

    def _observation(self) -> dict[str, Any]:
        return {
            "screenshot": SCREENSHOT,
            "accessibility_tree": None,
            "terminal": None,
            "instruction": self._instruction,
        }
