"""A Hugging Face dataset from the store: the library reads it with its images, the card says how it may be used."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from export_samples import make_state, picture
from PIL import Image

from osworld_pipeline.datasets.exporters.huggingface import HuggingFaceExport, export_huggingface
from osworld_pipeline.datasets.exporters.selection import Selection
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[StateDir, Path, HuggingFaceExport]:
    folder = tmp_path_factory.mktemp("hub")
    state = make_state(folder / "var")
    return state, folder / "out", export_huggingface(state, folder / "out")


def read(folder: Path, config: str) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob(f"data/{config}-*")) for row in pq.read_table(path).to_pylist()]


def test_every_row_and_every_image_is_there(exported) -> None:
    _, out, done = exported
    assert done.num_rows == {"steps": 14, "episodes": 7, "sequences": 7, "replay": 2}
    # The imported step has no screenshot.
    assert done.num_images == 13 + 2
    assert sorted(path.name for path in (out / "data").iterdir()) == [
        "episodes-00000-of-00001.parquet",
        "replay-00000-of-00001.parquet",
        "sequences-00000-of-00001.parquet",
        "steps-00000-of-00001.parquet",
    ]
    steps = [row for row in read(out, "steps") if row["episode_id"] == "e-cut"]
    assert [row["screenshot"]["bytes"] for row in steps] == [picture(1), picture(9, "JPEG")]
    assert [row["screenshot"]["path"].rpartition(".")[2] for row in steps] == ["png", "jpeg"]
    assert [row["outcome"] for row in steps] == ["truncated"] * 2


def test_the_files_name_their_features(exported) -> None:
    _, out, _ = exported
    metadata = pq.read_schema(out / "data" / "replay-00000-of-00001.parquet").metadata or {}
    features = json.loads(metadata[b"huggingface"])["info"]["features"]
    assert features["images"] == [{"_type": "Image"}]
    assert features["messages"][0]["content"][0]["text"] == {"dtype": "string", "_type": "Value"}
    assert features["reward"] == {"dtype": "float64", "_type": "Value"}


def test_maps_are_written_as_json(exported) -> None:
    _, out, _ = exported
    episode = next(row for row in read(out, "episodes") if row["episode_id"] == "e-success")
    assert json.loads(episode["times_s"]) == {"reset": 0.5, "total": 3.0}
    assert episode["instruction"] == "Do a."


def test_the_sampled_tokens_are_there_with_the_licence_of_their_episode(exported) -> None:
    _, out, _ = exported
    (sequence,) = (row for row in read(out, "sequences") if row["episode_id"] == "e-success")
    assert (sequence["sequence_index"], sequence["token_ids"], sequence["is_success"]) == (0, [1, 2, 3], True)


def test_the_card_counts_rows_licences_and_checkpoints(exported) -> None:
    _, out, done = exported
    card = (out / "README.md").read_text()
    assert card.startswith('---\nlicense:\n- "mit"\n- "unknown"\nconfigs:\n- config_name: steps\n')
    assert "| `steps` | agentnet | mit | 1 |" in card
    assert "| `steps` | this pipeline | **unknown** | 13 |" in card
    assert "| `replay` | sft_clean | mit | 2 |" in card
    assert "**The licence of 25 rows is unknown**" in card
    assert done.num_unknown_licence == 25
    assert "| gspo-1 | gspo_phase1 | sft-1 | recipe-of-gspo-1 | d | w |" in card


def test_every_column_has_a_meaning(exported) -> None:
    _, out, _ = exported
    rows = [line for line in (out / "README.md").read_text().split("## Columns")[1].splitlines() if line[:3] == "| `"]
    assert len(rows) > 100
    assert [row for row in rows if row.rstrip().endswith("|  |")] == []


def test_only_rows_with_the_requested_licences_are_exported(exported, tmp_path: Path) -> None:
    state, _, _ = exported
    done = export_huggingface(state, tmp_path / "out", selection=Selection(licences=("mit",)))
    assert done.num_rows == {"steps": 1, "episodes": 1, "sequences": 1, "replay": 2}
    assert done.num_unknown_licence == 0
    assert (tmp_path / "out" / "README.md").read_text().startswith('---\nlicense:\n- "mit"\nconfigs:\n')


def test_rows_that_this_pipeline_made_get_the_licence_that_its_owner_names(exported, tmp_path: Path) -> None:
    state, _, _ = exported
    done = export_huggingface(state, tmp_path / "out", own_licence="apache-2.0", configs=["episodes"])
    assert done.num_unknown_licence == 0
    licences = {row["episode_id"]: row["licence"] for row in read(tmp_path / "out", "episodes")}
    assert (licences["e-success"], licences["i-0"]) == ("apache-2.0", "MIT")


@pytest.mark.parametrize(
    ("selection", "num_episodes"),
    [
        (Selection(purposes=("train",)), 2),
        (Selection(checkpoints=("gspo-1",)), 3),
        (Selection(min_reward=0.5), 4),
        (Selection(where="seed = 3 AND outcome <> 'success'"), 1),
    ],
)
def test_filters_choose_episodes(exported, tmp_path: Path, selection: Selection, num_episodes: int) -> None:
    state, _, _ = exported
    done = export_huggingface(state, tmp_path / "out", selection=selection, configs=["episodes"])
    assert done.num_rows == {"episodes": num_episodes}


def test_a_file_that_reaches_its_size_limit_is_followed_by_another(exported, tmp_path: Path) -> None:
    state, _, _ = exported
    done = export_huggingface(state, tmp_path / "out", configs=["replay"], max_shard_bytes=1, batch_rows={"replay": 1})
    assert done.num_shards == {"replay": 2}
    assert [path.name for path in sorted((tmp_path / "out" / "data").iterdir())] == [
        "replay-00000-of-00002.parquet",
        "replay-00001-of-00002.parquet",
    ]
    assert [row["row_id"] for row in read(tmp_path / "out", "replay")] == ["r1", "r2"]


def test_an_unknown_config_names_the_known_ones(exported, tmp_path: Path) -> None:
    state, _, _ = exported
    with pytest.raises(DatasetError, match="no config named turns; there are: steps, episodes, sequences, replay"):
        export_huggingface(state, tmp_path / "out", configs=["turns"])


@pytest.mark.slow
def test_the_datasets_library_loads_it_with_images(exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = pytest.importorskip("datasets", reason="the `datasets` package is not installed")
    _, out, done = exported

    def load(folder: Path, config: str) -> Any:
        return datasets.load_dataset(str(folder), config, split="train", cache_dir=str(tmp_path / "cache"))

    assert {config: load(out, config).num_rows for config in done.num_rows} == done.num_rows
    loaded = load(out, "replay")
    assert loaded.features["images"].feature == datasets.Image()
    image = loaded[0]["images"][0]
    with Image.open(io.BytesIO(picture(200))) as seen:
        assert image.tobytes() == seen.tobytes()
    assert loaded[0]["messages"][2]["role"] == "assistant"


def test_a_config_without_rows_is_not_named_and_an_export_without_rows_is_refused(exported, tmp_path: Path) -> None:
    state, _, _ = exported
    none = Selection(checkpoints=("gspo-1",), licences=("mit",))
    done = export_huggingface(state, tmp_path / "replay", selection=none)
    assert (done.num_rows, done.num_shards) == ({"steps": 0, "episodes": 0, "sequences": 0, "replay": 2}, {"replay": 1})
    assert "config_name: steps" not in (tmp_path / "replay" / "README.md").read_text()
    with pytest.raises(DatasetError, match="passes these filters: nothing to export"):
        export_huggingface(state, tmp_path / "none", selection=Selection(licences=("gpl",)))
    assert not (tmp_path / "none").exists()
