"""The replay buffer: rows are found by id or chunk, injected only where a whole group failed, chosen by a seed, and
keep their origin."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from episode_samples import make_sequence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_samples import (
    failed_group,
    group_of,
    make_row,
    rollout,
    write_rows,
    write_verification,
    write_verifications,
)

from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.agent.renderer import Renderer, render_demonstration
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.episode import Outcome, TokenSequence
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import ReplayRow, base_task_id
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import StoreError, TableError
from osworld_pipeline.recipes.schema import AgentSection, ReplaySection
from osworld_pipeline.rollout.replay import ReplayBuffer, Served
from osworld_pipeline.rollout.trajectories import episode_trajectories, replay_trajectories
from osworld_pipeline.tables.owned import table_path


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def plain(group: RolloutGroup, row: ReplayRow) -> list[Trajectory]:
    return [Trajectory(trajectory_id=row.row_id, task_id=row.task_id, token_ids=(1,), response_mask=(1,), images=())]


@contextmanager
def buffer_of(state: StateDir, *rows: dict, seed: int = 0, **section) -> Iterator[ReplayBuffer]:
    with ReplayBuffer(write_rows(state, *rows), ReplaySection(**section), stage_key="stage", seed=seed) as buffer:
        yield buffer


def served_ids(served: Served) -> dict[str, str]:
    return {group_id: one.row.row_id for group_id, one in served.groups.items()}


def possible_rows(buffer: ReplayBuffer, task_id: str) -> set[str]:
    """All rows that 60 groups of the task get."""
    groups = [failed_group(task_id, group_id=f"g{index}") for index in range(60)]
    return set(served_ids(buffer.serve(groups, update=0, render=plain)).values())


@pytest.mark.parametrize(
    ("task_id", "base"),
    [("t_chunk0", "t"), ("a_chunk1_chunk12", "a_chunk1"), ("t", "t"), ("_chunk3", "_chunk3"), ("t_chunkx", "t_chunkx")],
)
def test_the_base_id_is_the_part_before_the_last_chunk(task_id: str, base: str) -> None:
    assert base_task_id(task_id) == base


def test_an_exact_id_is_found_before_chunks_of_its_base(state: StateDir) -> None:
    with buffer_of(state, make_row("a", "t_chunk0"), make_row("b", "t_chunk1"), make_row("c", "t")) as buffer:
        assert possible_rows(buffer, "t_chunk1") == {"b"}
        assert possible_rows(buffer, "t") == {"c"}
        assert possible_rows(buffer, "t_chunk9") == {"a", "b", "c"}
        assert possible_rows(buffer, "other") == set()


def test_other_chunks_are_used_if_the_exact_id_never_succeeded(state: StateDir) -> None:
    with buffer_of(state, make_row("a", "t_chunk0", reward=0.2), make_row("b", "t_chunk1")) as buffer:
        assert possible_rows(buffer, "t_chunk0") == {"b"}


def test_the_number_of_rows_per_task_is_limited_and_the_better_source_comes_first(state: StateDir) -> None:
    rows = [
        make_row("late", source_line=9),
        make_row("early", source_line=2),
        make_row("best", quality_rank=5, source_line=50),
        make_row("elsewhere", "u"),
    ]
    with buffer_of(state, *rows, per_task=2) as buffer:
        assert possible_rows(buffer, "t") == {"best", "early"}
        assert possible_rows(buffer, "u") == {"elsewhere"}


def test_a_row_of_an_older_table_without_rank_or_actions_can_be_served(state: StateDir) -> None:
    old = make_row("old", quality_rank=None, action_types=None, source_path=None, source_line=None)
    for strategy in ("uniform", "newest", "shortest", "recent_failure", "diverse"):
        with buffer_of(state, old, strategy=strategy) as buffer:
            assert possible_rows(buffer, "t") == {"old"}


def test_a_row_under_the_threshold_is_never_served(state: StateDir) -> None:
    with buffer_of(state, make_row("a", reward=0.69), make_row("b", reward=0.7), threshold=0.7) as buffer:
        assert possible_rows(buffer, "t") == {"b"}


def test_a_verified_row_is_required_where_the_recipe_says_so(state: StateDir) -> None:
    write_verification(state, "good", 0.0, attempt=0)
    write_verification(state, "good", 1.0, attempt=1)
    write_verification(state, "bad", 0.0)
    write_verification(state, "unlucky", None)
    rows = [make_row(name) for name in ("good", "bad", "unlucky", "untried")]
    with buffer_of(state, *rows, require_verified=True) as buffer:
        served = buffer.serve([failed_group()], update=0, render=plain)
        assert served_ids(served) == {"g": "good"}
        assert served.groups["g"].row.verified_reward == 1.0
        assert served.stats.num_verified == 1
    with buffer_of(state, *rows) as buffer:
        assert possible_rows(buffer, "t") == {"good", "bad", "unlucky", "untried"}


def test_a_failed_group_gets_a_row_with_its_messages_and_origin(state: StateDir) -> None:
    with buffer_of(state, make_row("a", "t_chunk2", images=["f" * 64])) as buffer:
        row = buffer.serve([failed_group()], update=0, render=plain).groups["g"].row
    assert (row.task_id, row.original_task_id, row.source_dataset, row.kind) == (
        "t",
        "t_chunk2",
        "sft_clean",
        "demonstration",
    )
    assert row.messages[-1] == {"role": "assistant", "content": [{"type": "text", "text": "Action: a"}]}
    assert row.image_sha256s == ("f" * 64,)


@pytest.mark.parametrize(
    "group",
    [
        group_of(rollout("a"), rollout("b", 0.5)),
        group_of(rollout("a"), task_id="unknown"),
        group_of(rollout("a", None)),
        group_of(),
    ],
)
def test_no_row_joins_a_group_that_succeeded_or_cannot_be_served_or_has_no_valid_episode(
    state: StateDir, group: RolloutGroup
) -> None:
    with buffer_of(state, make_row("a")) as buffer:
        assert buffer.serve([group], update=0, render=plain).groups == {}


def test_a_fault_among_failures_does_not_prevent_injection(state: StateDir) -> None:
    with buffer_of(state, make_row("a")) as buffer:
        served = buffer.serve([group_of(rollout("a"), rollout("b", None))], update=0, render=plain)
    assert served_ids(served) == {"g": "a"}


def draws(state: StateDir, *, seed: int, update: int, groups: Sequence[RolloutGroup]) -> dict[str, str]:
    with ReplayBuffer(state, ReplaySection(), stage_key="stage", seed=seed) as buffer:
        return served_ids(buffer.serve(groups, update=update, render=plain))


def test_the_choice_depends_only_on_seed_update_and_group(state: StateDir) -> None:
    write_rows(state, *(make_row(name) for name in "abcdefgh"))
    groups = [failed_group(group_id=f"g{index}") for index in range(12)]
    first = draws(state, seed=1, update=0, groups=groups)
    assert draws(state, seed=1, update=0, groups=groups) == first
    assert draws(state, seed=1, update=0, groups=groups[6:][::-1]) == {f"g{n}": first[f"g{n}"] for n in range(6, 12)}
    assert draws(state, seed=2, update=0, groups=groups) != first
    assert draws(state, seed=1, update=1, groups=groups) != first


def test_a_row_that_cannot_be_used_is_skipped_with_its_reason_and_the_next_is_tried(state: StateDir) -> None:
    def render(group: RolloutGroup, row: ReplayRow) -> list[Trajectory]:
        if row.row_id == "broken":
            raise StoreError("image abc is missing")
        if row.row_id == "long":
            raise ValueError("it does not fit")
        return plain(group, row)

    groups = [failed_group(group_id=f"g{index}") for index in range(20)]
    with buffer_of(state, *(make_row(name) for name in ("broken", "long", "good"))) as buffer:
        served = buffer.serve(groups, update=0, render=render)
    assert set(served_ids(served).values()) == {"good"}
    assert served.stats.num_served == 20
    assert served.stats.num_skipped == len(served.skipped) > 0
    assert {skipped.reason for skipped in served.skipped} == {"image abc is missing", "it does not fit"}
    assert str(served.skipped[0]).startswith(f"replay row {served.skipped[0].row_id} does not join group g")


def test_a_group_with_only_unusable_rows_gets_no_row_and_does_not_count_toward_the_limit(state: StateDir) -> None:
    def render(group: RolloutGroup, row: ReplayRow) -> list[Trajectory]:
        if row.task_id == "t":
            raise ValueError("broken")
        return plain(group, row)

    groups = [failed_group(group_id="g0"), failed_group("u", group_id="g1")]
    with buffer_of(state, make_row("a"), make_row("b", "u"), max_injections=1) as buffer:
        for update in range(8):
            assert served_ids(buffer.serve(groups, update=update, render=render)) == {"g1": "b"}


@pytest.mark.parametrize(("limit", "num_served"), [(0, 0), (3, 3), (None, 9)])
def test_an_update_injects_no_more_than_the_recipe_allows(state: StateDir, limit: int | None, num_served: int) -> None:
    groups = [failed_group(group_id=f"g{index}") for index in range(9)]
    with buffer_of(state, make_row("a"), max_injections=limit) as buffer:
        served = buffer.serve(groups, update=0, render=plain)
    assert len(served.groups) == num_served
    assert (served.stats.num_checks, served.stats.num_failed, served.stats.num_served) == (9, 9, num_served)


def test_statistics_count_checks_failures_and_injections(state: StateDir) -> None:
    with buffer_of(state, make_row("a")) as buffer:
        assert buffer.serve([], update=0, render=plain).stats.rate == 0.0
        groups = [failed_group(), group_of(rollout("s", 1.0), group_id="h"), failed_group("x", group_id="i")]
        stats = buffer.serve(groups, update=0, render=plain).stats
        assert (stats.num_checks, stats.num_failed, stats.num_served, stats.num_online) == (3, 2, 1, 0)
        assert stats.rate == pytest.approx(1 / 3)
        assert buffer.coverage(["t", "t_chunk4", "x", "y"]) == 0.5
        assert buffer.coverage([]) == 0.0


def test_an_empty_state_serves_nothing(state: StateDir) -> None:
    with ReplayBuffer(state, ReplaySection(include_online=True), stage_key="stage") as buffer:
        assert buffer.serve([failed_group()], update=0, render=plain).groups == {}


def test_a_row_that_was_removed_from_the_table_is_skipped(state: StateDir) -> None:
    with buffer_of(state, make_row("a")) as buffer:
        write_rows(state, make_row("b"))
        served = buffer.serve([failed_group()], update=0, render=plain)
    assert [skipped.reason for skipped in served.skipped] == ["replay row a is no longer in the replay buffer"]


def test_a_damaged_table_is_one_clear_error(state: StateDir) -> None:
    write_rows(state, make_row("a"))
    table_path(state, "replay_buffer").write_bytes(b"nonsense")
    with pytest.raises(TableError, match="replay_buffer again"):
        ReplayBuffer(state, ReplaySection())


TASKS = st.sampled_from(["t", "u", "t_chunk0", "t_chunk1", "u_chunk0", "t_chunk1_chunk2"])
ROWS = st.lists(st.tuples(TASKS, st.integers(0, 3), st.sampled_from([0.0, 0.4, 0.5, 1.0]), st.booleans()), max_size=12)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=ROWS,
    asked=st.lists(TASKS, min_size=1, max_size=6),
    per_task=st.integers(1, 3),
    limit=st.none() | st.integers(0, 4),
    require_verified=st.booleans(),
    strategy=st.sampled_from(["uniform", "newest", "shortest", "recent_failure", "diverse"]),
)
def test_the_rules_hold_for_any_table(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, int, float, bool]],
    asked: list[str],
    per_task: int,
    limit: int | None,
    require_verified: bool,
    strategy: str,
) -> None:
    state = StateDir(tmp_path_factory.mktemp("state"))
    table = {
        f"r{index}": make_row(f"r{index}", task, quality_rank=rank, reward=reward, source_line=index)
        for index, (task, rank, reward, _) in enumerate(rows)
    }
    verified = {f"r{index}" for index, row in enumerate(rows) if row[3]} if require_verified else set()
    write_verifications(state, dict.fromkeys(verified, 1.0))
    counting = [
        row for name, row in table.items() if row["reward"] >= 0.5 and (name in verified or not require_verified)
    ]
    groups = [failed_group(task_id, group_id=f"g{index}") for index, task_id in enumerate(asked)]
    section = {"per_task": per_task, "max_injections": limit, "require_verified": require_verified}
    with buffer_of(state, *table.values(), strategy=strategy, **section) as buffer:
        served = buffer.serve(groups, update=0, render=plain)
    can_be_served = 0
    for group in groups:
        exact = [row for row in counting if row["original_task_id"] == group.task_id]
        pool = exact or [row for row in counting if row["task_id"] == base_task_id(group.task_id)]
        can_be_served += bool(pool)
        if group.group_id not in served.groups:
            continue
        row = table[served.groups[group.group_id].row.row_id]
        assert row in pool
        siblings = [other for other in counting if other["original_task_id"] == row["original_task_id"]]
        siblings.sort(key=lambda other: (-other["quality_rank"], other["source_line"]))
        assert row in siblings[:per_task]
    assert len(served.groups) == min(can_be_served, len(groups) if limit is None else limit)


def replay_row(row_id: str, **changes) -> ReplayRow:
    fields = {
        "row_id": row_id,
        "task_id": "t",
        "original_task_id": "t",
        "source_dataset": "sft_clean",
        "reward": 1.0,
        "messages": (system_message("s"), user_message("u"), assistant_message("Action: a")),
    }
    return ReplayRow(**fields | changes)


def test_a_replay_row_becomes_a_trajectory_in_the_layout_of_episodes(
    renderer: Renderer, noise_png: Callable[[int, int, int], bytes]
) -> None:
    image = noise_png(64, 32, 0)
    sha256 = digest_bytes(image)
    replay = replay_row("abc", image_sha256s=(sha256,))
    agent, read_blob = AgentSection(system_prompt="short"), {sha256: image}.__getitem__
    (trajectory,) = replay_trajectories(replay, read_blob, renderer, agent=agent, advantage=1.5, weight=0.5)
    prompt = system_message(load_dialect("slime").system_prompt("short"))
    rendered = render_demonstration(renderer, (prompt, *replay.messages[1:]), [image])
    assert (trajectory.trajectory_id, trajectory.task_id) == ("replay:abc", "t")
    assert (trajectory.token_ids, trajectory.response_mask) == (rendered.token_ids, rendered.mask)
    assert trajectory.images == (image,)
    assert (trajectory.is_replay, trajectory.sampled_logprobs) == (True, None)
    assert (trajectory.advantage, trajectory.weight) == (1.5, 0.5)
    (demonstration,) = replay_trajectories(replay, read_blob, renderer, agent=agent, is_replay=False)
    assert (demonstration.trajectory_id, demonstration.is_replay) == ("demo:abc", False)


def test_a_broken_replay_row_is_named(renderer: Renderer) -> None:
    with pytest.raises(ValueError, match=r"replay row abc of task t: the conversation has \d+ image placeholders"):
        replay_trajectories(replay_row("abc"), {}.__getitem__, renderer, agent=AgentSection())


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if not outcome.is_valid])
def test_a_fault_never_becomes_a_trajectory(outcome: Outcome) -> None:
    with pytest.raises(ValueError, match="it is not trained on"):
        episode_trajectories(rollout("e", None, outcome=outcome), {}.__getitem__)


@pytest.mark.parametrize("sequences", [(), (make_sequence(response_mask=(0, 0, 0)),)])
def test_an_episode_without_sampled_tokens_never_becomes_a_trajectory(sequences: tuple[TokenSequence, ...]) -> None:
    with pytest.raises(ValueError, match="has no sampled tokens"):
        episode_trajectories(rollout("e", sequences=sequences), {}.__getitem__)


def test_a_buffer_may_be_closed_while_a_choice_runs_in_another_thread(state: StateDir) -> None:
    # A cancelled update leaves its thread behind; DuckDB refuses to close a connection that another thread uses.
    ended: list[BaseException] = []

    def choose(buffer: ReplayBuffer) -> None:
        try:
            while True:
                buffer.coverage(["t1"])
        except BaseException as error:  # noqa: BLE001 - looked at below
            ended.append(error)

    for _ in range(10):
        with buffer_of(state, make_row("a", task_id="t1")) as buffer:
            thread = threading.Thread(target=choose, args=(buffer,), daemon=True)
            thread.start()
            time.sleep(0.02)
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert len(ended) == 10
    assert all(isinstance(error, TableError) for error in ended)
