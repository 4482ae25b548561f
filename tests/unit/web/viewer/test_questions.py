"""Searches in the model's output, and conditions in SQL: they find what they should and can do nothing else."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from episode_samples import make_episode
from old_parts import make_old

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.compaction import compact_parts
from osworld_pipeline.web.viewer.filters import EpisodeFilter
from osworld_pipeline.web.viewer.index import EpisodeIndex
from osworld_pipeline.web.viewer.questions import MAX_KEPT, Questions
from osworld_pipeline.web.viewer.settings import BadQuestionError

Ask = Callable[..., Awaitable[list[str]]]


async def answers(questions: Questions, index: EpisodeIndex, **texts: str) -> list[str]:
    source = await questions.source(EpisodeFilter.from_query(texts.items()))
    with index.reading() as reader:
        return [row[0] for row in reader.rows(f"SELECT episode_id FROM {source} ORDER BY episode_id")]


@pytest.fixture(scope="module")
def ask(sample_state: StateDir, sample_index: EpisodeIndex) -> Ask:
    """The ids that a filter of these texts finds in the sample store."""
    return partial(answers, Questions(sample_state, sample_index), sample_index)


async def test_the_models_output_is_searched_without_regard_to_case(ask: Ask) -> None:
    assert await ask(said="TAKEN OVER") == ["hostile"]
    assert await ask(said="100% surely not said") == []


async def test_condition_sees_every_column_and_other_tables(ask: Ask) -> None:
    assert await ask(where="list_contains(map_keys(reward_parts), 'nothing') OR seed = 7") == ["hostile"]
    clicking = "episode_id IN (SELECT episode_id FROM steps WHERE action_error LIKE '%hyper%') AND purpose = 'train'"
    assert len(await ask(where=clicking)) == 2
    assert await ask(where="seed = 7 -- a remark") == ["hostile"]


async def test_several_texts_narrow_the_list_together(ask: Ask) -> None:
    found = await ask(where="is_success", said="Drag the folder", q="rename")
    assert len(found) == 3
    assert all("rename" in name or "gspo" in name for name in found)


async def test_conditions_see_compacted_and_rewritten_parts(tmp_path) -> None:
    state = StateDir(tmp_path)
    store = TrajectoryStore(state)
    store.write_episodes("a", [make_episode("e1"), make_episode("e2")])
    compact_parts(state.trajectories, min_parts=1)
    store.write_episodes("a", [make_episode("e1", seed=9)])
    index = EpisodeIndex(state)
    index.refresh()
    questions = Questions(state, index)
    assert await answers(questions, index, where="true") == ["e1"]
    assert await answers(questions, index, said="action") == ["e1"]
    index.close()


@pytest.mark.parametrize(
    "text",
    [
        "nonsense(",
        "1=1); DROP VIEW episodes; --",
        "1=1); COPY (SELECT 1) TO '/tmp/written.csv'; SELECT (1",
        "episode_id IN (SELECT content FROM read_text('/etc/passwd'))",
        "episode_id IN (SELECT column0 FROM read_csv('/etc/passwd'))",
        "episode_id IN (SELECT a FROM '/etc/passwd')",
        "getenv('HOME') <> ''",
    ],
)
async def test_a_condition_that_is_invalid_or_accesses_anything_else_is_refused(ask: Ask, text: str) -> None:
    with pytest.raises(BadQuestionError):
        await ask(where=text)


@pytest.mark.parametrize(
    ("text", "words"),
    [("shaped_rewards > 1", 'not found in FROM clause. Candidate bindings: "shaped_reward"'),
     ("lenn(task_id) > 1", 'Did you mean "len"?')],
)  # fmt: skip
async def test_a_refusal_suggests_an_existing_name(ask: Ask, text: str, words: str) -> None:
    with pytest.raises(BadQuestionError) as refused:
        await ask(where=text)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_viewer_of_an_older_state_names_the_command_that_migrates_it(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    TrajectoryStore(state).write_episodes("a", [make_episode("e1")])
    make_old(state)
    with pytest.raises(StoreError, match=r" migrate --state "):
        EpisodeIndex(state)


async def test_condition_that_takes_long_is_stopped(sample_state: StateDir, sample_index: EpisodeIndex) -> None:
    questions = Questions(sample_state, sample_index, limit_s=0.3)
    endless = "(SELECT count(*) FROM range(10000000) a, range(10000000) b) > 0"
    began = time.monotonic()
    with pytest.raises(BadQuestionError, match=r"stopped after 0\.3 s"):
        await questions.source(EpisodeFilter.from_query([("where", endless)]))
    assert time.monotonic() - began < 5


async def test_a_limited_number_of_answers_is_kept_until_the_store_changes(own_state: StateDir) -> None:
    index = EpisodeIndex(own_state)
    index.refresh()
    questions = Questions(own_state, index)
    first = EpisodeFilter.from_query([("said", "click")])
    name = await questions.source(first)
    assert await questions.source(first.toggled("outcome", "success")) == name
    TrajectoryStore(own_state).write_episodes("more", [make_episode("e9")])
    index.refresh(at_once=True)
    assert await questions.source(first) != name
    for number in range(MAX_KEPT + 2):
        await questions.source(EpisodeFilter.from_query([("said", f"word {number}")]))
    with index.reading() as reader:
        kept = reader.rows("SELECT count(*) FROM duckdb_tables() WHERE table_name LIKE 'found_%'")
    assert kept == [(MAX_KEPT,)]
