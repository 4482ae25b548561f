"""OSGym's environment over our env client, its records in the trajectory store, and a training step on them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from desktop_server import TASKS, DesktopServer
from osgym_envs import picture

from osworld_pipeline.domain.episode import Outcome, Reward, SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import RecipeError, ReplicaError, TaskError
from osworld_pipeline.integrations.osgym.batches import StepTokens, collate, model_inputs, step_row
from osworld_pipeline.integrations.osgym.encoding import PromptEncoder
from osworld_pipeline.integrations.osgym.environment import OsgymEnv
from osworld_pipeline.integrations.osgym.prompts import Markup, write_prompt
from osworld_pipeline.integrations.osgym.recording import EpisodeRecorder, fill_from_store
from osworld_pipeline.integrations.osgym.replay_buffer import ReplayBuffer
from osworld_pipeline.store.trajectories import TrajectoryStore

FINISH = "<|think_start|>ok<|think_end|><|action_start|>finish()<|action_end|>"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "t0.json").write_text(json.dumps(TASKS[0]))
    return folder


_OPEN: list[OsgymEnv] = []


@pytest.fixture(autouse=True)
def environments_are_closed() -> Iterator[None]:
    """Closes the environments, and with them the threads that watch their servers."""
    yield
    while _OPEN:
        _OPEN.pop().close()


def open_env(server: DesktopServer, tasks: Path, **more: Any) -> OsgymEnv:
    config = {"server_url": "http://s", "json_dir": str(tasks), "img_h": 128, "img_w": 128, "pause_s": 0.0, **more}
    _OPEN.append(OsgymEnv(config, 0, transport=server.transport))
    return _OPEN[-1]


def test_osgyms_configuration_reaches_the_server(tasks: Path) -> None:
    """These are the seven names in the env_config of OSGym's own client."""
    server = DesktopServer()
    env = open_env(server, tasks, max_step=100, max_hist=10, timeout=1000)
    env_ret, meta_info = env.reset()
    sent = server.requests[0]["env_config"]
    assert (sent["screen_size"], sent["image_size"]) == ([128, 128], [1260, 700])
    assert env_ret["obs"] == (TASKS[0]["instruction"], picture(0))
    assert (env_ret["done"], env_ret["is_init"], meta_info["task_id"]) == (False, True, "t0")
    assert write_prompt(env_ret["obs"]).startswith("Type good (0 \u00e9).<|vision_start|>")
    env.close()
    env.close()
    assert server.open == set()


def test_steps_have_osgyms_keys_and_the_prompt_grows(tasks: Path) -> None:
    server = DesktopServer()
    env = open_env(server, tasks)
    env.reset()
    env_ret, meta_info = env.step("<|think_start|>x<|think_end|><|action_start|>click(500,1000)<|action_end|>")
    assert server.actions == ["pyautogui.click(64, 127)"], "thousandths, held inside the screen"
    assert env_ret["prev_obs"] == (TASKS[0]["instruction"], picture(0))
    assert env_ret["obs"] == (*env_ret["prev_obs"], env_ret["action"], picture(10))
    assert (env_ret["reward"], env_ret["done"], env_ret["is_init"]) == (0.0, False, False)
    env.step("type(good)")
    env_ret, again = env.step(FINISH)
    assert (env_ret["reward"], env_ret["done"], again["uid"]) == (1.0, True, meta_info["uid"])
    assert server.open == set()
    with pytest.raises(ValueError, match="episode is over"):
        env.step("wait()")


def test_a_response_without_a_call_is_an_action_error_and_not_a_silent_wait(tasks: Path) -> None:
    server = DesktopServer()
    env = open_env(server, tasks)
    env.reset()
    env_ret, _ = env.step("let me think")
    assert server.actions == []
    assert "is not a call" in env_ret["action_error"]
    assert "[not carried out: " in env_ret["obs"][2]
    assert env_ret["obs"][3] == picture(0)


def test_step_that_uses_up_the_budget_is_carried_out_and_graded(tasks: Path) -> None:
    """OSGym sends finish() instead, and trains on the model's action as if it had been executed."""
    server = DesktopServer()
    env = open_env(server, tasks, max_step=1)
    env.reset()
    env_ret, _ = env.step("type(good)")
    assert (env_ret["reward"], env_ret["done"], env_ret["is_truncated"]) == (1.0, True, True)
    assert server.actions == ['pyautogui.write("good")']


def test_the_history_is_limited_to_max_hist(tasks: Path) -> None:
    """OSGym reads max_hist and never uses it."""
    env = open_env(DesktopServer(), tasks, max_hist=2)
    env.reset()
    for number in range(4):
        env_ret, _ = env.step(f"type({number})")
    assert env_ret["obs"] == (TASKS[0]["instruction"], picture(30), "type(3)", picture(40))
    env = open_env(DesktopServer(), tasks, max_hist=1)
    env.reset()
    assert env.step("type(0)")[0]["obs"] == (TASKS[0]["instruction"], picture(10))


def test_conversation_is_written_as_the_chat_template_writes_it(tasks: Path, processor: Any) -> None:
    env = open_env(DesktopServer(), tasks, prompt_format="chatml")
    env.reset()
    prompt = env.step("type(0)")[0]["obs"]
    text = "".join(part if isinstance(part, str) else "<image>" for part in prompt)
    begin, _, rest = text.partition("Type good (0 \u00e9).")
    assert begin.startswith("<|im_start|>system\nYou operate a computer.")
    assert begin.endswith("<|im_end|>\n<|im_start|>user\n")
    turn = "<image><|im_end|>\n<|im_start|>assistant\n"
    assert rest == f"{turn}type(0)<|im_end|>\n<|im_start|>user\n{turn}"
    assert all(isinstance(part, Markup) == ("<|im_" in part) for part in prompt if isinstance(part, str))


def test_a_fault_is_raised_and_the_desktop_is_released(tasks: Path) -> None:
    server = DesktopServer()
    env = open_env(server, tasks)
    env.reset()
    server.faults["/step"] = (500, {"error": "it died", "fault": "env_fault"})
    with pytest.raises(ReplicaError, match="it died"):
        env.step("wait()")
    assert server.open == set()
    env.reset()


def test_configuration_is_checked(tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"env_config\.max_steps: Extra inputs"):
        open_env(DesktopServer(), tasks, max_steps=3)
    with pytest.raises(RecipeError, match="no dialect"):
        open_env(DesktopServer(), tasks, dialect="klingon")
    with pytest.raises(TaskError, match="no tasks below"):
        open_env(DesktopServer(), tmp_path / "nothing")
    (tasks / "bad.json").write_text("[1]")
    with pytest.raises(TaskError, match=r"bad\.json does not contain a task"):
        open_env(DesktopServer(), tasks)


def play(env: OsgymEnv, encoder: PromptEncoder, recorder: EpisodeRecorder, *texts: str) -> list[StepTokens]:
    """Plays an episode with these texts as turns, with the token ids of the tokenizer as samples."""
    env_ret, _ = env.reset()
    sampled = []
    for text in texts:
        ids = tuple(encoder.tokenizer(text)["input_ids"])
        tokens = StepTokens(prompt=encoder.encode(env_ret["obs"]), response_ids=ids, logprobs=(-0.25,) * len(ids))
        env_ret, meta_info = env.step(text)
        recorder.add(env_ret, meta_info, tokens)
        sampled.append(tokens)
    return sampled


def test_recorded_episode_fills_a_buffer_token_by_token(tasks: Path, processor: Any, tmp_path: Path) -> None:
    store = TrajectoryStore(StateDir(tmp_path / "var"))
    encoder = PromptEncoder(processor.tokenizer, processor, max_length=200)
    recorder = EpisodeRecorder(store, checkpoint_id="c1", sampling=SamplingParams(temperature=1.0), policy_version=4)
    env = open_env(DesktopServer(), tasks, max_hist=2)
    sampled = play(env, encoder, recorder, "type(good)", "wait()", FINISH)
    play(env, encoder, recorder, FINISH)
    (won,), (lost,) = sorted(
        (store.read_episodes(part) for part in store.existing_parts()), key=lambda part: -len(part[0].steps)
    )
    assert (won.outcome, lost.outcome, won.provider) == (Outcome.SUCCESS, Outcome.FAILURE, "fake")
    assert [step.command for step in won.steps] == ['pyautogui.write("good")', "WAIT", "DONE"]
    assert [step.screenshot_num_bytes for step in won.steps] == [len(picture(shade)) for shade in (0, 10, 20)]
    assert won.steps[0].signals.screen_diff > 0
    assert [sequence.image_steps for sequence in won.sequences] == [(0,), (0, 1), (1, 2)]
    buffer = ReplayBuffer(gamma=0.5)
    assert fill_from_store(buffer, store) == 2
    of_won = [env_ret for _, env_ret, meta in buffer.items if meta["uid"] == won.episode_id]
    assert [env_ret["tokens"] for env_ret in of_won] == [
        StepTokens(
            prompt=type(tokens.prompt)(
                token_ids=tokens.prompt.token_ids, raw_token_ids=tokens.prompt.token_ids, images=tokens.prompt.images
            ),
            response_ids=tokens.response_ids,
            logprobs=pytest.approx(tokens.logprobs),
        )
        for tokens in sampled
    ]
    assert [env_ret["reward"] for env_ret in of_won] == [0.25, 0.5, 1.0]


def test_lost_episode_is_recorded_as_a_fault_and_fills_nothing(tasks: Path, processor: Any, tmp_path: Path) -> None:
    store = TrajectoryStore(StateDir(tmp_path / "var"))
    encoder = PromptEncoder(processor.tokenizer, processor, max_length=200)
    recorder = EpisodeRecorder(store, checkpoint_id="c1", sampling=SamplingParams(temperature=1.0))
    env = open_env(DesktopServer(), tasks)
    play(env, encoder, recorder, "wait()")
    recorder.fault(env._meta_info["uid"], "the desktop died")
    recorder.fault("never", "nothing was reported about it")
    ((part,),) = [store.read_episodes(part) for part in store.existing_parts()]
    assert (part.outcome, part.error, part.reward, len(part.steps)) == (Outcome.ENV_FAULT, "the desktop died", None, 1)
    assert fill_from_store(ReplayBuffer(), store) == 0
    with pytest.raises(ValueError, match="has no record"):
        recorder.add({"reward": 0.0}, {"uid": "x"}, StepTokens(prompt=encoder.encode(("a",)), response_ids=(1,)))


TAMPERED = (500, {"error": "a program of the desktop ended its X server", "fault": "tampering"})


@pytest.mark.parametrize("path", ["/step", "/evaluate"])
def test_tampering_ends_the_episode_as_a_failure_that_is_trained_on(
    path: str, tasks: Path, processor: Any, tmp_path: Path
) -> None:
    store = TrajectoryStore(StateDir(tmp_path / "var"))
    encoder = PromptEncoder(processor.tokenizer, processor, max_length=200)
    recorder = EpisodeRecorder(store, checkpoint_id="c1", sampling=SamplingParams(temperature=1.0))
    server = DesktopServer()
    env = open_env(server, tasks)
    play(env, encoder, recorder, "type(good)")
    server.faults[path] = TAMPERED
    tokens = StepTokens(prompt=encoder.encode((f"after {path}",)), response_ids=(1,), logprobs=(-0.5,))
    env_ret, meta_info = env.step(FINISH)
    assert (env_ret["reward"], env_ret["done"], env_ret["is_truncated"]) == (0.0, True, False)
    assert env_ret["tampering"] == TAMPERED[1]["error"]
    assert server.open == set()
    recorder.add(env_ret, meta_info, tokens)
    (episode,) = (episode for part in store.existing_parts() for episode in store.read_episodes(part))
    assert (episode.outcome, episode.error, len(episode.steps)) == (Outcome.TAMPERING, TAMPERED[1]["error"], 2)
    assert episode.reward == Reward(task=0.0, shaped=0.0)
    buffer = ReplayBuffer(gamma=1.0)
    assert fill_from_store(buffer, store) == 1
    assert [env_ret["reward"] for _, env_ret, _ in buffer.items] == [0.0, 0.0]
    with pytest.raises(ValueError, match="episode is over"):
        env.step("wait()")
    server.faults.clear()
    assert env.reset()[0]["is_init"]


def test_a_training_step_learns_what_was_rewarded(
    tasks: Path, processor: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    """Policy gradient on a batch of the buffer: good steps become likelier, bad ones do not."""
    from osworld_pipeline.training.model import load_model

    store = TrajectoryStore(StateDir(tmp_path / "var"))
    encoder = PromptEncoder(processor.tokenizer, processor, max_length=96)
    recorder = EpisodeRecorder(store, checkpoint_id="c1", sampling=SamplingParams(temperature=1.0))
    env = open_env(DesktopServer(), tasks, max_hist=1)
    play(env, encoder, recorder, "type(good)", FINISH)
    play(env, encoder, recorder, "type(bad)", FINISH)
    buffer = ReplayBuffer(gamma=1.0, seed=0)
    assert fill_from_store(buffer, store) == 2
    rows = [
        step_row(encoder, env_ret["tokens"], worker, meta, reward=env_ret["reward"], max_response_length=80)
        for worker, env_ret, meta in buffer.sample(4)
    ]
    batch = collate(rows)
    model: Any = load_model(tiny_folder)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    is_response = batch["attention_mask"][:, 96:].bool()

    def logprobs_B() -> torch.Tensor:
        logits = model(**model_inputs(batch)).logits[:, 95:-1]
        picked = torch.log_softmax(logits, -1).gather(-1, batch["responses"][..., None])[..., 0]
        return (picked * is_response).sum(1)

    before = logprobs_B().detach()
    advantage_B = batch["reward"] - batch["reward"].mean()
    assert sorted(advantage_B.tolist()) == [-0.5, -0.5, 0.5, 0.5]
    for _ in range(3):
        loss = -(advantage_B * logprobs_B()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    gained = logprobs_B().detach() - before
    good, bad = gained[advantage_B > 0], gained[advantage_B < 0]
    assert torch.isfinite(gained).all()
    assert good.mean() > bad.mean() + 0.1
