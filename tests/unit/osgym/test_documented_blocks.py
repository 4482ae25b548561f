"""The Python blocks of docs/osgym.md run unchanged, except for the address of the env server."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from desktop_server import TASKS, DesktopServer, listening

from osworld_pipeline.integrations.osgym.batches import Batch, model_inputs

PAGE = Path(__file__).resolve().parents[3] / "docs" / "osgym.md"
DOCUMENTED = "http://127.0.0.1:8100"
DATALOADER, GYMNASIUM = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
FINISH = "<|think_start|>ok<|think_end|><|action_start|>finish()<|action_end|>"
R = 32


class EnoughError(Exception):
    """Ends the documented loop, which does not end by itself."""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder `tasks` of the page."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "t0.json").write_text(json.dumps(TASKS[0]))
    monkeypatch.chdir(tmp_path)


def run(block: str, url: str, **names: Any) -> dict[str, Any]:
    assert DOCUMENTED in block
    namespace = {"__name__": "__main__", **names}
    exec(compile(block.replace(DOCUMENTED, url), str(PAGE), "exec"), namespace)
    return namespace


@pytest.mark.usefixtures("tasks")
def test_documented_dataloader_feeds_a_policy_and_a_training(processor: Any) -> None:
    tokenizer = processor.tokenizer
    trained: list[Batch] = []

    def policy(batch: Batch) -> Batch:
        ids = torch.tensor([*tokenizer(FINISH)["input_ids"], tokenizer.eos_token_id])
        num_rows = len(batch["worker_id"])
        responses = torch.full((num_rows, max(R, len(ids))), tokenizer.pad_token_id)
        responses[:, : len(ids)] = ids
        mask = (torch.arange(responses.shape[1]) < len(ids)).long().expand(num_rows, -1)
        return {**batch, "responses": responses, "attention_mask": torch.cat([batch["attention_mask"], mask], dim=1)}

    def train(batch: Batch) -> None:
        trained.append(batch)
        raise EnoughError

    server = DesktopServer((1260, 700))
    with listening(server) as url, pytest.raises(EnoughError):
        run(DATALOADER, url, tokenizer=tokenizer, processor=processor, policy=policy, train=train)
    (batch,) = trained
    assert batch["reward"].tolist() == [0.0] * 8
    assert len(batch["responses"]) == len(batch["input_ids"]) == 8
    assert "pixel_values" in model_inputs(batch)
    assert server.open == set(), "the block gives every desktop back"


@pytest.mark.usefixtures("tasks")
def test_documented_gymnasium_environment_takes_a_step() -> None:
    server = DesktopServer((1920, 1080))
    with listening(server) as url:
        names = run(GYMNASIUM, url)
        try:
            assert names["observation"]["screenshot"].shape == (1080, 1920, 3)
            assert names["observation"]["instruction"] == TASKS[0]["instruction"]
            assert (names["reward"], names["terminated"], names["truncated"]) == (0.0, False, False)
            assert server.actions == ['pyautogui.click(64, 32)\npyautogui.write("hello")']
        finally:
            names["env"].close()
    assert server.open == set()
