"""Stored files that another program may have written: parts, vocabularies, checkpoints, and prompts of environments."""

import functools
import tempfile
from pathlib import Path

from episode_samples import make_episode
from old_parts import make_old

from fuzz.parser import Parser, scratch_folder, text_of
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError, TableError
from osworld_pipeline.integrations.osgym.prompts import read_prompt, without_oldest, write_prompt
from osworld_pipeline.runs.checkpoints.external import add_checkpoint
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.format_note import NOTE
from osworld_pipeline.store.migration import migrate_parts
from osworld_pipeline.store.pack_files import read_members
from osworld_pipeline.store.packs import Packs, write_pack
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.web.viewer.settings import NotFoundError
from osworld_pipeline.web.viewer.tokens import load_vocabulary

VOCABULARY = b'{"model": {"vocab": {"a": 0, "\\u0120b": 1}}, "added_tokens": [{"id": 2, "content": "<|im_end|>"}]}'
CONFIG = b'{"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}'


def _written(folder: Path, table: str) -> Path:
    state = StateDir(folder)
    TrajectoryStore(state).write_episodes("fuzz", [make_episode()])
    (path,) = (state.trajectories / table).rglob("*.parquet")
    return path


@functools.cache
def _seed(table: str) -> bytes:
    with scratch_folder() as folder:
        return _written(folder, table).read_bytes()


def _part(table: str, data: bytes) -> None:
    with scratch_folder() as folder:
        _written(folder, table).write_bytes(data)
        store = TrajectoryStore(StateDir(folder))
        for part in store.existing_parts():
            store.read_episodes(part)


@functools.cache
def _old_seed() -> bytes:
    with scratch_folder() as folder:
        path = _written(folder, "episodes")
        make_old(StateDir(folder))
        return path.read_bytes()


def _old_part(data: bytes) -> None:
    with scratch_folder() as folder:
        _written(folder, "episodes").write_bytes(data)
        for sequences in (StateDir(folder).trajectories / "sequences").glob("*.parquet"):
            sequences.unlink()
        (StateDir(folder).trajectories / NOTE).unlink()  # without this file the state has format 1
        migrate_parts(StateDir(folder).trajectories)
        store = TrajectoryStore(StateDir(folder))
        for part in store.existing_parts():
            store.read_episodes(part)


def _packed(folder: Path) -> Packs:
    image = b"an image"
    write_pack(folder, iter([(f"{digest_bytes(image)}.png", image, 1_600_000_000.0)]), temp_folder=folder)
    return Packs(folder)


@functools.cache
def _pack_seed(suffix: str) -> bytes:
    with scratch_folder() as folder:
        _packed(folder)
        (path,) = folder.rglob(f"*{suffix}")
        return path.read_bytes()


def _pack(suffix: str, data: bytes) -> None:
    """A pack of images, or the index of a pack: reading it never returns bytes other than those that were stored."""
    with scratch_folder() as folder:
        packs = _packed(folder)
        (path,) = folder.rglob(f"*{suffix}")
        path.write_bytes(data)
        assert packs.read(digest_bytes(b"an image")) in (b"an image", None)
        for name in packs.here():
            read_members(packs.path(name))
        packs.check()


def _vocabulary(data: bytes) -> None:
    with scratch_folder() as folder:
        path = folder / "tokenizer.json"
        path.write_bytes(data)
        load_vocabulary(path)


def _prompt(data: bytes) -> None:
    prompt = read_prompt(text_of(data))
    shorter = without_oldest(prompt)
    assert shorter is None or len(shorter) < len(prompt)
    write_prompt(prompt)


def _model(data: bytes) -> None:
    """The model's config.json. A folder without weights is refused in the end."""
    with scratch_folder() as folder:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_bytes(data)
        (folder / "model" / "tokenizer.json").write_bytes(VOCABULARY)
        add_checkpoint(StateDir(folder), str(folder / "model"))


@functools.cache
def _state() -> StateDir:
    state = StateDir(Path(tempfile.mkdtemp(prefix="fuzz-query-")))
    TrajectoryStore(state).write_episodes("fuzz", [make_episode()])
    rebuild_catalog(state)
    return state


def _query(data: bytes) -> None:
    run_query(_state(), text_of(data), timeout_s=2.0)


PARSERS = [
    Parser(
        name="episode_part",
        read=lambda data: _part("episodes", data),
        refusals=(StoreError,),
        seeds=(_seed("episodes"),),
    ),
    Parser(name="step_part", read=lambda data: _part("steps", data), refusals=(StoreError,), seeds=(_seed("steps"),)),
    Parser(
        name="sequence_part",
        read=lambda data: _part("sequences", data),
        refusals=(StoreError,),
        seeds=(_seed("sequences"),),
    ),
    Parser(name="old_part", read=_old_part, refusals=(StoreError,), seeds=(_old_seed(),)),
    Parser(name="pack", read=lambda data: _pack(".zip", data), refusals=(StoreError,), seeds=(_pack_seed(".zip"),)),
    Parser(
        name="pack_index",
        read=lambda data: _pack(".index", data),
        refusals=(StoreError,),
        seeds=(_pack_seed(".index"),),
    ),
    Parser(name="vocabulary", read=_vocabulary, refusals=(NotFoundError,), seeds=(VOCABULARY,)),
    Parser(
        name="environment_prompt",
        read=_prompt,
        refusals=(ValueError,),
        seeds=(b"text <|vision_start|>aGk=<|vision_end|> more <|vision_start|>aGk=<|vision_end|>", b"plain"),
    ),
    Parser(
        name="query",
        read=_query,
        refusals=(TableError,),
        seeds=(
            b"SELECT * FROM episodes",
            b"SELECT count(*) FROM steps WHERE step_index > 1",
        ),
    ),
]
