"""How weights get from the trainer to the engine: no copy too many, no folder left, no engine without the newest."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from osworld_pipeline.agent.adapters import FOLDER
from osworld_pipeline.errors import EngineError
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.gspo.weights import Handover, InMemory, InPlace, ThroughFolder, Write, shares_model


class Recorder:
    """An engine that records what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, int]] = []
        self.error: Exception | None = None

    def mark_updated(self, *, policy_version: int) -> None:
        self.calls.append(("in place", policy_version))

    async def load_state(self, state: Any, *, policy_version: int) -> None:
        self.calls.append((state, policy_version))

    async def load(self, folder: Path, policy_version: int) -> None:
        if self.error is not None:
            raise self.error
        assert (folder / "weights").is_file(), "a server reads what is there"
        self.calls.append((folder.name, policy_version))


async def save(folder: Path) -> Write:
    return partial(make_folder, folder)


async def hand_over(handover: Handover, policy_version: int) -> int:
    return await (await handover(policy_version))()


def make_folder(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("w")


def folders(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


async def test_a_shared_model_is_only_marked_as_updated_and_a_copy_gets_the_weights() -> None:
    engine = Recorder()
    assert await hand_over(InPlace(engine), 3) == 0, "nothing leaves the process"

    async def read() -> dict[str, int]:
        return {"w": 1}

    assert await hand_over(InMemory(engine, read), 4) == 0
    assert engine.calls == [("in place", 3), ({"w": 1}, 4)]


async def test_a_folder_stays_until_the_next_one_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "weights-0007").mkdir()
    engine = Recorder()
    handover = ThroughFolder(engine.load, save, tmp_path)
    assert folders(tmp_path) == [], "what a killed run left is gone"
    await hand_over(handover, 1)
    assert folders(tmp_path) == ["weights-0001"]
    await hand_over(handover, 2)
    assert folders(tmp_path) == ["weights-0002"]
    assert engine.calls == [("weights-0001", 1), ("weights-0002", 2)]


async def test_the_reported_bytes_of_whole_weights_and_of_an_adapter_are_those_that_were_written(
    tmp_path: Path,
) -> None:
    def write(folder: Path) -> None:
        (folder / FOLDER).mkdir(parents=True)
        make_folder(folder / "else")
        (folder / "weights").touch()
        (folder / "model.safetensors").write_bytes(b"w" * 50)
        (folder / FOLDER / "adapter_model.safetensors").write_bytes(b"w" * 8)

    async def save_tensors(folder: Path) -> Write:
        return partial(write, folder)

    assert await hand_over(ThroughFolder(Recorder().load, save_tensors, tmp_path), 1) == 58


async def test_weights_that_an_engine_refuses_end_the_run_and_the_previous_weights_stay(tmp_path: Path) -> None:
    engine = Recorder()
    handover = ThroughFolder(engine.load, save, tmp_path)
    await hand_over(handover, 1)
    engine.error = EngineError("no server took the weights")
    with pytest.raises(EngineError, match="no server took the weights"):
        await hand_over(handover, 2)
    assert "weights-0001" in folders(tmp_path)


def test_an_engine_shares_the_trainers_model_only_where_nothing_trains_while_it_samples() -> None:
    def recipe_of(**sections: dict[str, Any]) -> Recipe:
        fields = load_recipe("smoke").model_dump(mode="json")
        for name, changes in sections.items():
            fields[name] |= changes
        return Recipe.model_validate(fields)

    class Trainer:
        shares_weights = True

    class Sharded:
        shares_weights = False

    assert shares_model(recipe_of(), Trainer())
    assert not shares_model(recipe_of(), Sharded())
    assert not shares_model(recipe_of(rollout={"mode": "asynchronous"}), Trainer())
    assert not shares_model(recipe_of(engine={"kind": "sglang", "urls": ["http://127.0.0.1:1"]}), Trainer())
