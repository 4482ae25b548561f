"""States from before version 10, whose token lists are columns of episodes."""

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from episode_samples import make_episode, make_sequence
from old_parts import files_of, make_old

from osworld_pipeline.atomic_io import write_parquet
from osworld_pipeline.domain.episode import ContextMode, Episode
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.runs.upkeep.migrate import migrate_state
from osworld_pipeline.runs.upkeep.upkeep import compact_store, rebuild_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.format_note import FORMAT, read_format
from osworld_pipeline.store.old_tokens import OLD_COLUMNS
from osworld_pipeline.store.part_files import COMPACTED
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

TOKENS = "SELECT episode_id, sequence_index, token_ids, sampled_logprobs, image_steps FROM sequences ORDER BY ALL"
WINDOWS = (make_sequence(3, num_images=1), make_sequence(5, num_images=2))
EPISODES = (
    make_episode("e-append"),
    make_episode("e-windows", context_mode=ContextMode.WINDOW, sequences=WINDOWS),
    make_episode("e-text", sequences=()),
)
IN_ORDER = tuple(sorted(EPISODES, key=lambda episode: episode.episode_id))


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    store = TrajectoryStore(state)
    for episode in EPISODES:
        store.write_episodes(episode.episode_id, [episode])
    return state


def read_all(state: StateDir) -> tuple[Episode, ...]:
    store = TrajectoryStore(state)
    return tuple(episode for name in store.existing_parts() for episode in store.read_episodes(name))


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_migrated_state_reads_as_the_same_episodes_and_tokens(state: StateDir, is_compacted: bool) -> None:
    rebuild_catalog(state)
    if is_compacted:
        compact_store(state, min_parts=1, retired_grace_s=0)
        compact_store(state, min_parts=1, retired_grace_s=0)
        assert [path.parent.name for path in files_of(state, "episodes")] == [COMPACTED]
    before, tokens = read_all(state), run_query(state, TOKENS).rows
    assert len(tokens) == 3
    make_old(state)
    heads = {path: path.read_bytes() for path in files_of(state, "episodes")}
    done = migrate_state(state)
    assert (done.parts.num_old, done.parts.num_without_sequences) == (len(heads), len(heads))
    assert run_query(state, TOKENS).rows == tokens
    with duckdb.connect(str(state.catalog), read_only=True) as plain:
        assert plain.execute(TOKENS).fetchall() == tokens
    assert read_all(state) == before == IN_ORDER
    assert heads.items() <= {path: path.read_bytes() for path in files_of(state, "episodes")}.items()
    assert read_format(state.trajectories).format == FORMAT


def test_every_use_of_an_old_state_names_the_command_that_migrates_it(state: StateDir) -> None:
    rebuild_catalog(state)
    make_old(state)
    before = {path: path.read_bytes() for path in state.root.rglob("*") if path.is_file()}
    uses = (
        TrajectoryStore,
        rebuild_catalog,
        rebuild_store,
        lambda state: compact_store(state, min_parts=1),
        lambda state: run_query(state, TOKENS),
    )
    for use in uses:
        with pytest.raises(StoreError, match=r"3 files in .*episodes are of .* below 10.* migrate --state"):
            use(state)
    left = {path: path.read_bytes() for path in state.root.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert left.items() <= before.items()


def test_a_migration_drops_the_old_columns(state: StateDir) -> None:
    make_old(state)
    migrate_state(state)
    (head,) = files_of(state, f"episodes/{COMPACTED}")
    assert not OLD_COLUMNS["episodes"] & set(pq.read_schema(head).names)
    assert read_all(state) == IN_ORDER


def test_a_lost_file_of_sequences_is_an_error_and_not_replaced_by_no_tokens(state: StateDir) -> None:
    lost = next(path for path in files_of(state, "sequences") if path.name.startswith("e-append"))
    lost.unlink()
    store = TrajectoryStore(state)
    assert not lost.exists()
    with pytest.raises(StoreError, match=r"sequences/e-append.* is missing"):
        store.find_episode("e-append")
    with pytest.raises(StoreError, match=r"sequences/e-append.* is missing"):
        compact_store(state, min_parts=1)


def test_tokens_that_cannot_be_split_into_sequences_are_refused(state: StateDir) -> None:
    make_old(state)
    (head,) = (path for path in files_of(state, "episodes") if path.name.startswith("e-append"))
    table = pq.read_table(head)
    place = table.schema.get_field_index("sequence_lengths")
    nulls = pa.nulls(table.num_rows, pa.list_(pa.int32()))
    write_parquet(head, table.set_column(place, "sequence_lengths", nulls))
    with pytest.raises(StoreError, match="tokens without the lengths of its sequences"):
        migrate_state(state)


@pytest.mark.parametrize(
    ("column", "lengths"), [("sequence_image_counts", [1]), ("sequence_lengths", [4]), ("sequence_lengths", [1, 2])]
)
def test_lengths_that_do_not_fit_the_tokens_are_refused(state: StateDir, column: str, lengths: list[int]) -> None:
    make_old(state)
    (head,) = (path for path in files_of(state, "episodes") if path.name.startswith("e-append"))
    table = pq.read_table(head)
    values = pa.array([lengths], pa.list_(pa.int32()))
    write_parquet(head, table.set_column(table.schema.get_field_index(column), column, values))
    with pytest.raises(StoreError, match=r"episodes/e-append.* is damaged"):
        migrate_state(state)
