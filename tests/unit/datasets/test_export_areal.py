"""AReaL's per-turn tensors from the store: the reference's table, with the defects of its example fixed."""

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from episode_samples import make_episode, make_step
from PIL import Image

from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.datasets.exporters.areal import export_areal
from osworld_pipeline.datasets.exporters.areal_reader import read_turns
from osworld_pipeline.datasets.exporters.areal_turns import split_turns, turn_tensors
from osworld_pipeline.datasets.exporters.selection import Selection
from osworld_pipeline.domain.episode import ContextMode, Outcome, Reward, TokenSequence
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.store import TrajectoryStore

SIZE = (64, 64)


@pytest.fixture(scope="module")
def processor(tiny_folder: Path) -> Any:
    return load_processor(tiny_folder)


def picture(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", SIZE, (shade, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def sequence(renderer: Renderer, turns: list[tuple[str, str, bool]], steps: tuple[int, ...]) -> TokenSequence:
    """A sequence of turns, each (text that is read, text that is said, whether there is a screenshot)."""
    ids: list[int] = []
    mask: list[int] = []
    for text, said, has_image in turns:
        image = renderer.image_ids(width=SIZE[0], height=SIZE[1]) if has_image else []
        prompt, output = [*image, *renderer.encode(text)], renderer.encode(said)
        ids += prompt + output
        mask += [0] * len(prompt) + [1] * len(output)
    return TokenSequence(
        token_ids=tuple(ids),
        response_mask=tuple(mask),
        sampled_logprobs=tuple(-0.25 * bit for bit in mask),
        policy_versions=tuple(7 if bit else -1 for bit in mask),
        image_steps=steps,
    )


def state_of(root: Path, processor: Any) -> StateDir:
    state = StateDir(root)
    store, renderer = TrajectoryStore(state), Renderer(processor)
    shots = tuple(
        make_step(index, sha256=store.write_blob(picture(40 * index), suffix="png"), screenshot_format="png")
        for index in range(3)
    )
    said = [("look", "click here", True), ("look again", "then type", True), ("and again", "DONE", True)]
    whole = sequence(renderer, said, (0, 1, 2))
    windows = tuple(
        sequence(renderer, said[max(0, turn - 1) : turn + 1], tuple(range(max(0, turn - 1), turn + 1)))
        for turn in range(3)
    )
    # The earlier turns in a window were not sampled there.
    windows = tuple(_only_last(window) for window in windows)
    common = {"processor_digest": renderer.processor_digest, "steps": shots, "group_id": "g1"}

    def made(name: str, outcome: Outcome, task: float | None, **changes: Any) -> Any:
        reward = None if task is None else Reward(task=task, shaped=task / 2)
        fields = {**common, "outcome": outcome, "reward": reward, "sequences": (whole,), **changes}
        return make_episode(name, **fields)

    store.write_episodes(
        "a",
        [
            made("won", Outcome.SUCCESS, 1.0),
            made("lost", Outcome.FAILURE, 0.0, sequences=windows, context_mode=ContextMode.WINDOW),
            made("died", Outcome.ENV_FAULT, None, error="the desktop died"),
            made("alone", Outcome.SUCCESS, 1.0, group_id="g2"),
            made("untold", Outcome.SUCCESS, 1.0, sequences=(), group_id="g3"),
        ],
    )
    return state


def _only_last(window: TokenSequence) -> TokenSequence:
    mask = np.asarray(window.response_mask)
    starts = np.flatnonzero(np.diff(np.concatenate(([0], mask))) == 1)
    mask[: starts[-1]] = 0
    kept = tuple(mask.tolist())
    return TokenSequence(
        token_ids=window.token_ids,
        response_mask=kept,
        sampled_logprobs=tuple(-0.25 * bit for bit in kept),
        policy_versions=tuple(7 if bit else -1 for bit in kept),
        image_steps=window.image_steps,
    )


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory, processor: Any) -> StateDir:
    return state_of(tmp_path_factory.mktemp("areal") / "var", processor)


def lines(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        row["episode_id"]: row for row in map(json.loads, (folder / "episodes.jsonl").read_text().splitlines())
    }  # fmt: skip


def only(episode: str) -> Selection:
    return Selection(where=f"episode_id = '{episode}'")


def test_each_turn_has_the_references_keys_dtypes_and_shapes(
    state: StateDir, tiny_folder: Path, tmp_path: Path
) -> None:
    export_areal(state, tmp_path / "out", processor=tiny_folder, selection=only("won"))
    turns = list(read_turns(tmp_path / "out"))
    assert len(turns) == 3
    for number, turn in enumerate(turns, start=1):
        length = turn["input_ids"].shape[1]
        assert {
            key: (value.dtype, tuple(value.shape)) for key, value in turn.items() if key != "multi_modal_input"
        } == {
            "input_ids": (torch.int64, (1, length)),
            "mm_token_type_ids": (torch.int64, (1, length)),
            "loss_mask": (torch.int32, (1, length)),
            "logprobs": (torch.float32, (1, length)),
            "versions": (torch.int32, (1, length)),
            "attention_mask": (torch.bool, (1, length)),
            "rewards": (torch.float32, (1,)),
        }
        (seen,) = turn["multi_modal_input"]
        assert seen["image_grid_thw"].shape == (number, 3)
        assert seen["image_grid_thw"].dtype == torch.int64
        assert seen["pixel_values"].shape == (int(seen["image_grid_thw"].prod(-1).sum()), 1536)
        assert seen["pixel_values"].dtype == torch.float32


def test_a_turn_has_the_values_of_the_sampler_over_its_output_and_none_over_its_prompt(
    state: StateDir, tiny_folder: Path, tmp_path: Path, processor: Any
) -> None:
    export_areal(state, tmp_path / "out", processor=tiny_folder, selection=only("won"))
    turns = list(read_turns(tmp_path / "out"))
    whole = turns[-1]["input_ids"][0].tolist()
    for turn, said in zip(turns, ("click here", "then type", "DONE"), strict=True):
        ids, mask = turn["input_ids"][0], turn["loss_mask"][0].bool()
        assert processor.tokenizer.decode(ids[mask]) == said
        assert whole[: len(ids)] == ids.tolist()
        assert mask.sum() == mask[-int(mask.sum()) :].sum()
        assert turn["logprobs"][0].tolist() == [-0.25 if bit else 0.0 for bit in mask]
        assert turn["versions"][0].tolist() == [7 if bit else -1 for bit in mask]
        assert turn["attention_mask"].all()
        assert turn["mm_token_type_ids"][0].tolist() == (ids == processor.image_token_id).long().tolist()


def test_turns_of_windows_and_of_one_growing_sequence_are_exported_alike(
    state: StateDir, tiny_folder: Path, tmp_path: Path
) -> None:
    export_areal(state, tmp_path / "out", processor=tiny_folder, selection=only("lost"))
    turns = list(read_turns(tmp_path / "out"))
    assert [len(turn["multi_modal_input"][0]["image_grid_thw"]) for turn in turns] == [1, 2, 2]
    assert [float(turn["rewards"]) for turn in turns] == [0.0, 0.0, 0.0]


def test_an_image_is_stored_once_however_many_turns_show_it(state: StateDir, tiny_folder: Path, tmp_path: Path) -> None:
    """Six copies in the reference: over 15 turns of a full screen that is 6 GB."""
    done = export_areal(state, tmp_path / "out", processor=tiny_folder, selection=only("won"))
    turns = list(read_turns(tmp_path / "out"))
    assert done.num_images == 3
    assert sum(len(turn["multi_modal_input"][0]["image_grid_thw"]) for turn in turns) == 6
    patches = [turn["multi_modal_input"][0]["pixel_values"] for turn in turns]
    assert torch.equal(patches[2][: len(patches[1])], patches[1])
    assert not torch.equal(patches[0], patches[1][len(patches[0]) :])


def test_faults_are_left_out_and_counted_never_scored(state: StateDir, tiny_folder: Path, tmp_path: Path) -> None:
    done = export_areal(state, tmp_path / "out", processor=tiny_folder)
    assert (done.num_episodes, done.num_turns) == (3, 9)
    assert done.left_out == {"env_fault": 1, "no_tokens": 1}
    assert set(lines(tmp_path / "out")) == {"won", "lost", "alone"}
    assert json.loads((tmp_path / "out" / "export.json").read_text())["counts"]["left_out"] == done.left_out


def test_every_turn_of_a_success_gets_a_positive_reward(state: StateDir, tiny_folder: Path, tmp_path: Path) -> None:
    """In the reference the first turns of a success get a negative advantage, because it is discounted and taken over
    the whole batch. A group whose episodes earned alike has no signal, and a fault is not counted as a sibling."""
    done = export_areal(state, tmp_path / "out", processor=tiny_folder, reward="group")
    found = {name: row["reward"] for name, row in lines(tmp_path / "out").items()}
    assert found == {"won": 1.0, "lost": -1.0}
    assert done.left_out == {"env_fault": 1, "no_spread": 1, "no_tokens": 1}


@pytest.mark.parametrize(("discount", "rewards"), [(1.0, [1.0, 1.0, 1.0]), (0.9, [0.81, 0.9, 1.0])])
def test_turns_share_the_reward_unless_a_discount_is_asked_for(
    state: StateDir, tiny_folder: Path, tmp_path: Path, discount: float, rewards: list[float]
) -> None:
    export_areal(state, tmp_path / "out", processor=tiny_folder, selection=only("won"), turn_discount=discount)
    assert [float(turn["rewards"]) for turn in read_turns(tmp_path / "out")] == pytest.approx(rewards)


def test_an_episode_too_long_for_a_trainer_is_reported_and_left_out_whole(
    state: StateDir, tiny_folder: Path, tmp_path: Path
) -> None:
    done = export_areal(state, tmp_path / "out", processor=tiny_folder)
    assert done.longest_sequence == max(turn["input_ids"].shape[1] for turn in read_turns(tmp_path / "out"))
    limit = lines(tmp_path / "out")["lost"]["longest_sequence"]
    done = export_areal(state, tmp_path / "less", processor=tiny_folder, max_tokens=limit)
    assert set(lines(tmp_path / "less")) == {"lost"}
    assert done.left_out["too_long"] == 2
    assert done.longest_sequence <= limit


def test_a_turn_without_an_image_keeps_its_place_among_those_with_one(
    processor: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    """The reference leaves its entry out, and every later sequence then has another one's images."""
    state, renderer = StateDir(tmp_path / "var"), Renderer(processor)
    store = TrajectoryStore(state)
    shot = make_step(0, sha256=store.write_blob(picture(9), suffix="png"), screenshot_format="png")
    mixed = sequence(renderer, [("no picture", "WAIT", False), ("a picture", "DONE", True)], (0,))
    common = {"outcome": Outcome.SUCCESS, "reward": Reward(task=1.0), "processor_digest": renderer.processor_digest}
    store.write_episodes("a", [make_episode("mixed", sequences=(mixed,), steps=(shot,), **common)])
    export_areal(state, tmp_path / "out", processor=tiny_folder)
    turns = list(read_turns(tmp_path / "out"))
    assert [len(turn["multi_modal_input"]) for turn in turns] == [1, 1]
    assert [sorted(turn["multi_modal_input"][0]) for turn in turns] == [[], ["image_grid_thw", "pixel_values"]]


def test_a_text_only_export_has_the_ordinary_text_tensors(processor: Any, tiny_folder: Path, tmp_path: Path) -> None:
    state, renderer = StateDir(tmp_path / "var"), Renderer(processor)
    text = sequence(renderer, [("a screenshot was left out", "click", False), ("go on", "DONE", False)], ())
    common = {"outcome": Outcome.FAILURE, "reward": Reward(task=0.0), "processor_digest": renderer.processor_digest}
    TrajectoryStore(state).write_episodes("a", [make_episode("text", sequences=(text,), steps=(), **common)])
    export_areal(state, tmp_path / "out", processor=tiny_folder)
    for turn in read_turns(tmp_path / "out"):
        assert sorted(turn) == ["attention_mask", "input_ids", "logprobs", "loss_mask", "rewards", "versions"]


def test_placeholders_that_disagree_with_their_images_are_refused(processor: Any) -> None:
    renderer = Renderer(processor)
    whole = sequence(renderer, [("look", "click", True)], (0,))
    (turn,) = split_turns([whole], image_token_id=processor.image_token_id)
    grid = np.asarray([1, 4, 4])
    assert turn_tensors(processor, turn, [grid], reward=0.0, is_multimodal=True)["input_ids"].shape[0] == 1
    for grids in ([], [grid, grid], [np.asarray([1, 8, 8])]):
        with pytest.raises(ValueError, match=r"image|placeholders"):
            turn_tensors(processor, turn, grids, reward=0.0, is_multimodal=True)


def test_tokens_of_another_processor_are_refused(processor: Any, tiny_folder: Path, tmp_path: Path) -> None:
    state = StateDir(tmp_path / "var")
    text = sequence(Renderer(processor), [("go", "DONE", False)], ())
    common = {"outcome": Outcome.FAILURE, "reward": Reward(task=0.0), "processor_digest": "another"}
    TrajectoryStore(state).write_episodes("a", [make_episode("x", sequences=(text,), steps=(), **common)])
    with pytest.raises(DatasetError, match="another processor: set --processor to the folder"):
        export_areal(state, tmp_path / "out", processor=tiny_folder)
    assert not (tmp_path / "out").exists()


def test_an_export_without_episodes_is_refused_and_says_why(state: StateDir, tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no episode to export \(1 env_fault\)"):
        export_areal(state, tmp_path / "out", processor=tiny_folder, selection=only("died"))


def test_the_reader_in_the_export_needs_nothing_of_this_project(
    state: StateDir, tiny_folder: Path, tmp_path: Path
) -> None:
    export_areal(state, tmp_path / "out", processor=tiny_folder)
    source = tmp_path / "out" / "areal_reader.py"
    assert "osworld_pipeline" not in source.read_text()
    spec = importlib.util.spec_from_file_location("a_copy", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(list(module.read_turns(tmp_path / "out"))) == 9
