"""OSGym's MultiTurnDataloader over environments in their own processes: batches, training rows, faults, and a close
that leaves nothing behind."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from desktop_server import TASKS, DesktopServer, listening
from osgym_envs import CountingEnv, picture

from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.integrations.osgym.batches import Batch
from osworld_pipeline.integrations.osgym.dataloader import MultiTurnDataloader
from osworld_pipeline.integrations.osgym.dataset import MultiTurnDataset
from osworld_pipeline.integrations.osgym.environment import OsgymEnv

P, R = 96, 24

MakeLoader = Callable[..., MultiTurnDataloader]


@pytest.fixture
def loader_of(processor: Any) -> Iterator[MakeLoader]:
    """Makes a loader over these env configs. It is closed after the test."""
    made: list[MultiTurnDataloader] = []

    def make(*env_configs: dict[str, Any], **options: Any) -> MultiTurnDataloader:
        defaults: dict[str, Any] = {
            "batch_size": 1, "max_prompt_length": P, "max_response_length": R, "timeout_s": 60.0, "seed": 0,
            "replay_reward_discount": 0.5, "close_grace_s": 5.0,
        }  # fmt: skip
        loader = MultiTurnDataloader(CountingEnv, env_configs, processor.tokenizer, processor, **defaults | options)
        made.append(loader)
        return loader

    yield make
    for loader in made:
        loader.close()


def answer(batch: Batch, tokenizer: Any, *texts: str, ids: Sequence[int] | None = None) -> Batch:
    """What a policy returns: responses padded on the right, the mask of prompt and response."""
    responses = torch.full((len(batch["worker_id"]), R), tokenizer.pad_token_id)
    mask = torch.zeros_like(responses)
    for row in range(len(responses)):
        sampled = ids or [*tokenizer(texts[row % len(texts)])["input_ids"], tokenizer.eos_token_id]
        responses[row, : len(sampled)] = torch.tensor(sampled)
        mask[row, : len(sampled)] = 1
    return {
        "prompts": batch["input_ids"],
        "responses": responses,
        "attention_mask": torch.cat([batch["attention_mask"], mask], dim=1),
        "worker_id": batch["worker_id"],
        "meta_info": batch["meta_info"],
    }


def play(loader: MultiTurnDataloader, tokenizer: Any, num_rounds: int, text: str = "click(1,2)") -> None:
    for _ in range(num_rounds):
        loader.async_step(answer(next(loader), tokenizer, text))


def test_batches_have_the_documented_keys_and_shapes(loader_of: MakeLoader, processor: Any) -> None:
    tokenizer = processor.tokenizer
    loader = loader_of({}, {}, batch_size=2)
    batch = next(loader)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, P)
    assert batch["position_ids"].shape == (2, 3, P)
    assert sorted(batch["worker_id"]) == [0, 1]
    for row in range(2):
        grid = batch["multi_modal_inputs"][row]["image_grid_thw"]
        assert batch["multi_modal_inputs"][row]["pixel_values"].shape[0] == int(grid.prod())
        assert set(batch["meta_info"][row]) == {"uid"}
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
        assert tokenizer.decode(ids).startswith(f"task of {batch['worker_id'][row]}")
        assert ids.count(processor.image_token_id) == 4
        assert batch["raw_prompt_ids"][row].count(processor.image_token_id) == 1
        assert batch["multi_modal_data"][row]["image"][0].size == (64, 64)
    loader.async_step(answer(batch, tokenizer, "click(1,2)"))
    play(loader, tokenizer, 1, "finish()")
    rows = loader.sample_from_buffer(4)
    assert rows["input_ids"].shape == rows["attention_mask"].shape == (4, P + R)
    assert rows["position_ids"].shape == (4, 3, P + R)
    assert rows["responses"].shape == (4, R)
    assert sorted(rows["reward"].tolist()) == [0.5, 0.5, 1.0, 1.0]
    assert {key for key in batch if key not in rows} == set()


def test_a_training_row_has_the_token_ids_that_were_sampled(loader_of: MakeLoader, processor: Any) -> None:
    """OSGym decodes a response and tokenises it again, which changes these ids."""
    tokenizer = processor.tokenizer
    ids = [tokenizer.convert_tokens_to_ids(token) for token in "click"]
    assert tokenizer(tokenizer.decode(ids))["input_ids"] != ids or len(ids) == 5
    ids += [tokenizer.eos_token_id]
    loader = loader_of({"num_steps": 1})
    prompt = next(loader)
    returned = answer(prompt, tokenizer, ids=ids)
    returned["rollout_log_probs"] = torch.arange(R, dtype=torch.float32)[None] / -10
    loader.async_step(returned)
    row = loader.sample_from_buffer(1)
    assert row["responses"][0, : len(ids)].tolist() == ids
    assert row["input_ids"][0, :P].tolist() == prompt["input_ids"][0].tolist()
    assert row["input_ids"][0, P : P + len(ids)].tolist() == ids
    assert row["attention_mask"][0, P:].tolist() == [1] * len(ids) + [0] * (R - len(ids))
    assert row["rollout_log_probs"][0, : len(ids)].tolist() == pytest.approx([-number / 10 for number in range(6)])


def test_text_environments_need_no_processor(loader_of: MakeLoader, processor: Any) -> None:
    """OSGym's loader uses a variable that it never sets in this case."""
    loader = loader_of({"shows": "text", "num_steps": 1}, is_multi_modal=False)
    batch = next(loader)
    assert batch["position_ids"].shape == (1, P)
    assert "multi_modal_inputs" not in batch
    loader.async_step(answer(batch, processor.tokenizer, "click(1,2)"))
    assert loader.sample_from_buffer(1)["position_ids"].shape == (1, P + R)


def test_osgyms_tagged_strings_show_the_same_images(loader_of: MakeLoader) -> None:
    loader = loader_of({"shows": "tagged"})
    assert next(loader)["multi_modal_data"][0]["image"][0].getpixel((0, 0)) == (0, 0, 0)
    assert loader.num_faults == 0


def test_the_screen_of_a_finished_episode_is_not_offered_and_the_next_episode_is(
    loader_of: MakeLoader, processor: Any
) -> None:
    """OSGym offers the last screen of an episode and discards the policy's response to it."""
    loader = loader_of({"num_steps": 1}, {"num_steps": 1}, batch_size=2)
    seen = []
    for _ in range(3):
        batch = next(loader)
        assert sorted(batch["worker_id"]) == [0, 1]
        seen += [meta_info["uid"] for meta_info in batch["meta_info"]]
        assert [len(data["image"]) for data in batch["multi_modal_data"]] == [1, 1], "the prompt of a new episode"
        loader.async_step(answer(batch, processor.tokenizer, "click(1,2)"))
    assert len(set(seen)) == 6


def test_an_episode_holds_each_screenshot_once(loader_of: MakeLoader, processor: Any) -> None:
    """OSGym keeps the whole history as base64 with every step: 10,000 of them do not fit in memory."""
    loader = loader_of({"num_steps": 4}, max_prompt_length=200)
    play(loader, processor.tokenizer, 4)
    loader.sample_from_buffer(4)
    items = loader.replay.items
    assert [len(env_ret["tokens"].prompt.images) for _, env_ret, _ in items] == [1, 2, 3, 4]
    held = [image for _, env_ret, _ in items for image in env_ret["tokens"].prompt.images]
    assert len({id(image) for image in held}) == 4
    assert set(held) == {picture(40 * step) for step in range(4)}
    assert all("obs" not in env_ret and "prev_obs" not in env_ret for _, env_ret, _ in items)


@pytest.mark.parametrize("harm", ["fault", "bug", "die"])
def test_a_lost_episode_gives_no_reward_and_the_environment_continues(
    loader_of: MakeLoader, processor: Any, harm: str
) -> None:
    """OSGym waits without a limit for a process that died, and its client repeats failed requests without a limit."""
    loader = loader_of({"num_steps": 2})
    play(loader, processor.tokenizer, 1)
    batch = next(loader)
    lost = batch["meta_info"][0]["uid"]
    loader.async_step(answer(batch, processor.tokenizer, harm))
    play(loader, processor.tokenizer, 2)
    rows = loader.sample_from_buffer(2)
    assert loader.num_faults == 1
    assert lost not in {meta_info["uid"] for meta_info in rows["meta_info"]}
    assert loader.replay.num_open_episodes == 0
    assert sorted(rows["reward"].tolist()) == [0.5, 1.0]


def test_tampering_is_a_finished_episode_without_reward(processor: Any, tmp_path: Path) -> None:
    server = DesktopServer()
    (tmp_path / "t0.json").write_text(json.dumps(TASKS[0]))
    with listening(server) as url:
        config = {"server_url": url, "json_dir": str(tmp_path), "img_h": 128, "img_w": 128, "pause_s": 0.0}
        options: dict[str, Any] = {"max_prompt_length": P, "max_response_length": R, "timeout_s": 60.0, "batch_size": 1}
        with MultiTurnDataloader(OsgymEnv, [config], processor.tokenizer, processor, **options) as loader:
            play(loader, processor.tokenizer, 1, "type(good)")
            batch = next(loader)
            server.faults["/step"] = (500, {"error": "its X server was ended", "fault": "tampering"})
            loader.async_step(answer(batch, processor.tokenizer, "type(bad)"))
            next(loader)
            assert loader.num_faults == 0
            assert [env_ret["reward"] for _, env_ret, _ in loader.replay.items] == [0.0, 0.0]


def test_environment_that_fails_at_every_step_ends_the_run(loader_of: MakeLoader, processor: Any) -> None:
    loader = loader_of({"num_steps": "many"}, max_faults=2)
    play(loader, processor.tokenizer, 2)
    with pytest.raises(EnvServerError, match="environment 0 failed 2 times in a row, the last time with: TypeError"):
        next(loader)


def test_answer_to_a_lost_episode_is_dropped(loader_of: MakeLoader, processor: Any) -> None:
    loader = loader_of({})
    batch = next(loader)
    stale = answer(batch, processor.tokenizer, "click(1,2)")
    loader.async_step(answer(batch, processor.tokenizer, "fault"))
    fresh = next(loader)
    loader.async_step(stale)
    loader.async_step(answer(fresh, processor.tokenizer, "click(1,2)"))
    assert next(loader)["meta_info"][0] == fresh["meta_info"][0]


def test_waits_that_would_never_end_are_refused(loader_of: MakeLoader, processor: Any) -> None:
    loader = loader_of({}, timeout_s=30)
    batch = next(loader)
    with pytest.raises(ValueError, match="1 of 1 environments wait for an action"):
        next(loader)
    with pytest.raises(ValueError, match="3 steps of finished episodes would never end"):
        loader.sample_from_buffer(3)
    loader.async_step(answer(batch, processor.tokenizer, "sleep"))
    loader._timeout_s = 0.2
    started = time.monotonic()
    with pytest.raises(EnvServerError, match=r"waited 0\.2 s for 1 environments"):
        next(loader)
    assert time.monotonic() - started < 5
    loader._close_grace_s = 0.2


def test_wrong_answers_are_refused_before_anything_is_sent(loader_of: MakeLoader, processor: Any) -> None:
    tokenizer = processor.tokenizer
    loader = loader_of({}, {}, batch_size=2)
    batch = next(loader)
    twice = answer(batch, tokenizer, "click(1,2)")
    for key in ("worker_id", "meta_info"):
        twice[key] = np.array([batch[key][0], batch[key][0]], dtype=object)
    with pytest.raises(ValueError, match="two rows belong to one environment"):
        loader.async_step(twice)
    empty = answer(batch, tokenizer, "click(1,2)")
    empty["attention_mask"][1, P:] = 0
    with pytest.raises(ValueError, match=r"row 1 answers environment \d with an empty response"):
        loader.async_step(empty)
    loader.async_step(answer(batch, tokenizer, "click(1,2)"))
    with pytest.raises(ValueError, match="does not wait for an action"):
        loader.async_step(answer(batch, tokenizer, "click(1,2)"))


def test_batch_larger_than_the_environments_is_refused(loader_of: MakeLoader) -> None:
    with pytest.raises(ValueError, match="batch_size is 3, but must be 1 to 2"):
        loader_of({}, {}, batch_size=3)


def test_closed_loader_leaves_no_process_and_no_open_desktop(
    loader_of: MakeLoader, processor: Any, tmp_path: Path
) -> None:
    """OSGym's loader cannot be closed: its processes live as long as the trainer."""
    notes = tmp_path / "notes"
    loader = loader_of({"notes": str(notes)}, {"notes": str(notes)}, batch_size=2)
    play(loader, processor.tokenizer, 1)
    pids = [slot.process.pid for slot in loader._slots]
    loader.close()
    loader.close()
    lines = notes.read_text().splitlines()
    assert sorted(line.split()[:2] for line in lines) == [
        ["closed", "0"],
        ["closed", "1"],
        ["made", "0"],
        ["made", "1"],
    ]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def test_an_environment_that_does_not_exit_is_terminated(loader_of: MakeLoader, processor: Any) -> None:
    loader = loader_of({}, close_grace_s=0.3)
    play(loader, processor.tokenizer, 1, "sleep")
    pid = loader._slots[0].process.pid or 0
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 10
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_stats_report_sizes_balance_and_outcome_rewards(
    loader_of: MakeLoader, processor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = loader_of({"num_steps": 2}, {"num_steps": 1, "reward": 0.0}, batch_size=2)
    play(loader, processor.tokenizer, 2)
    loader.sample_from_buffer(4)
    loader.print_stats_in_replay_buffer()
    printed = capsys.readouterr().out
    assert "Replay buffer size: 4. Number of uids: 3." in printed
    assert "(x-y): 1-2, 2-1." in printed
    assert loader.get_balance_stats() == (2, 2)
    assert loader.calculate_outcome_reward() == pytest.approx(1 / 3)
    assert loader.running_outcome_reward() == pytest.approx(0.01, rel=0.02)
    loader.clear_replay_buffer()
    assert loader.calculate_outcome_reward() == 0.0


def test_torch_reads_batches_from_a_dataset_but_not_in_its_workers(loader_of: MakeLoader, processor: Any) -> None:
    from torch.utils.data import DataLoader

    loader = loader_of({"num_steps": 2}, {"num_steps": 2}, batch_size=2)
    dataset = MultiTurnDataset(
        loader, lambda batch: answer(batch, processor.tokenizer, "click(1,2)"), num_batches=2, batch_size=3
    )
    batches = list(DataLoader(dataset, batch_size=None))
    assert [batch["responses"].shape for batch in batches] == [(3, R), (3, R)]
    assert len(dataset) == 2
