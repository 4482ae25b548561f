"""OSGym's data engine and the Gymnasium environment on real desktops of a real env server."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import httpx
import pytest
import torch
from env_server_process import RunningServer, running_env_server
from gymnasium.utils.env_checker import check_env

from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.domain.episode import Outcome, SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.suites import build_suite
from osworld_pipeline.integrations.osgym.batches import Batch, model_inputs
from osworld_pipeline.integrations.osgym.dataloader import MultiTurnDataloader
from osworld_pipeline.integrations.osgym.environment import OsgymEnv
from osworld_pipeline.integrations.osgym.gym_env import ENV_ID
from osworld_pipeline.integrations.osgym.recording import EpisodeRecorder, fill_from_store
from osworld_pipeline.integrations.osgym.replay_buffer import ReplayBuffer
from osworld_pipeline.store.trajectories import TrajectoryStore

pytestmark = [pytest.mark.desktop, pytest.mark.slow]

SCREEN = (512, 320)
P, R = 384, 80
TASK: dict[str, Any] = {
    "id": "touch",
    "instruction": "Make a file.",
    "config": [
        {"type": "launch", "parameters": {"command": ["xterm", "-T", "Work", "-e", "cat > /tmp/typed"]}},
        {"type": "activate_window", "parameters": {"window_name": "Work"}},
    ],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": "cat /tmp/typed", "shell": True},
        "expected": {"type": "rule", "rules": {"expected": "good\n"}},
    },
}
TURNS = ("type(good)&press(enter)&hotkey(ctrl,d)", "finish()")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    with running_env_server(folder, "--screen-size", f"{SCREEN[0]}x{SCREEN[1]}", num_replicas=2) as running:
        yield running


def wait_until_all_are_free(server: RunningServer) -> None:
    """Waits until all desktops are free, because a returned desktop is reset first."""
    deadline = time.monotonic() + 30
    while httpx.get(f"{server.url}/health", timeout=10, trust_env=False).json()["free"] != 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_dataloader_on_real_desktops_feeds_a_training_step(
    server: RunningServer, tiny_folder: Path, tmp_path: Path
) -> None:
    from osworld_pipeline.training.model import load_model

    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "touch.json").write_text(json.dumps(TASK))
    config = {
        "server_url": server.url, "json_dir": str(tmp_path / "tasks"), "img_w": SCREEN[0], "img_h": SCREEN[1],
        "vlm_img_w": 256, "vlm_img_h": 160, "max_step": 3, "max_hist": 2, "timeout": 60, "pause_s": 0.3,
    }  # fmt: skip
    processor = load_processor(tiny_folder)
    model: Any = load_model(tiny_folder)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    store = TrajectoryStore(StateDir(tmp_path / "var"))
    recorder = EpisodeRecorder(store, checkpoint_id="tiny", sampling=SamplingParams(temperature=1.0))
    steps_of: dict[str, int] = {}

    def act(batch: Batch) -> Batch:
        """Worker 0 solves the task, worker 1 gives up at once."""
        responses = torch.full((len(batch["worker_id"]), R), processor.tokenizer.pad_token_id)
        for row, worker_id in enumerate(batch["worker_id"]):
            uid = batch["meta_info"][row]["uid"]
            turn = steps_of.get(uid, 0)
            steps_of[uid] = turn + 1
            text = TURNS[min(turn, 1)] if worker_id == 0 else "call_user()"
            ids = processor.tokenizer(text)["input_ids"]
            responses[row, : len(ids)] = torch.tensor(ids)
        mask = (responses != processor.tokenizer.pad_token_id).long()
        logits = model(**model_inputs(batch)).logits
        assert torch.isfinite(logits[:, -1]).all(), "the prompts are what the model takes"
        return {
            **batch,
            "responses": responses,
            "attention_mask": torch.cat([batch["attention_mask"], mask], dim=1),
            "rollout_log_probs": torch.full(responses.shape, -1.0),
        }

    with MultiTurnDataloader(
        OsgymEnv, [config, config], processor.tokenizer, processor, batch_size=1, replay_reward_discount=1.0,
        max_prompt_length=P, max_response_length=R, timeout_s=180, recorder=recorder, seed=0,
    ) as loader:  # fmt: skip
        for _ in range(40):
            if min(loader.get_balance_stats()) >= 2:
                break
            loader.async_step(act(next(loader)))
        batch = loader.sample_from_buffer(4)
        assert loader.num_faults == 0
    wait_until_all_are_free(server)
    assert sorted(batch["reward"].tolist()) == [0.0, 0.0, 1.0, 1.0]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    logits = model(**model_inputs(batch)).logits[:, P - 1 : -1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, batch["responses"][..., None])[..., 0]
    advantages = batch["reward"] - batch["reward"].mean()
    loss = -(advantages * (logprobs * batch["attention_mask"][:, P:]).sum(1)).mean()
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    episodes = [episode for part in store.existing_parts() for episode in store.read_episodes(part)]
    assert {episode.outcome for episode in episodes} == {Outcome.SUCCESS, Outcome.FAILURE}
    assert {episode.provider for episode in episodes} == {"local"}
    assert fill_from_store(ReplayBuffer(), store) == len(episodes)


def test_gymnasium_environment_passes_its_checker_and_solves_a_task_on_a_real_desktop(server: RunningServer) -> None:
    suite = build_suite(seed=0, families=("click_button",), num_train=1, num_heldout=1, screen=SCREEN)
    (task,) = suite.train
    options = {"server_url": server.url, "screen_size": SCREEN, "pause_s": 0.2, "max_steps": 20}
    checked = gymnasium.make(ENV_ID, tasks=[dict(task.task.config)], **options)
    check_env(checked.unwrapped, skip_render_check=True)
    checked.close()
    envs = gymnasium.make_vec(ENV_ID, num_envs=2, vectorization_mode="sync", tasks=[TASK], **options)
    try:
        observations, _ = envs.reset(seed=1)
        assert observations["screenshot"].shape == (2, SCREEN[1], SCREEN[0], 3)
        envs.step((TURNS[0], "wait()"))
        _, rewards, terminated, truncated, _ = envs.step((TURNS[1], "finish()"))
        assert (rewards.tolist(), terminated.tolist(), truncated.tolist()) == ([1.0, 0.0], [True, True], [False] * 2)
    finally:
        envs.close()
    wait_until_all_are_free(server)
