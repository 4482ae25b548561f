"""Successes of our own rollouts as replay: seen after their update, the same after a kill, with a traceable origin."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from episode_samples import make_sequence, make_step
from replay_samples import failed_group, group_of, make_row, rollout, write_rows

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.checkpoint import Ancestor
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.episode import EpisodePurpose, Outcome
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.replay import ReplayRow
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import AgentSection, ReplaySection
from osworld_pipeline.rollout.batch import GspoBatch
from osworld_pipeline.rollout.replay import ReplayBuffer
from osworld_pipeline.runs.gspo.batch import RowRenderer, build_batch
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import fresh_views

ONLINE = ReplaySection(include_online=True)
PROVENANCE = """
SELECT i.kind, i.strategy, i.verified_reward, i."update", e.stage_key, e."update", s.step_index, s.screenshot_sha256
FROM injections i JOIN episodes e ON e.episode_id = i.row_id JOIN steps s ON s.episode_id = e.episode_id
ORDER BY s.step_index
"""


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def plain(group: RolloutGroup, row: ReplayRow) -> list[Trajectory]:
    return [Trajectory(trajectory_id=row.row_id, task_id=row.task_id, token_ids=(1,), response_mask=(1,), images=())]


def possible_rows(
    state: StateDir, *, update: int, stage_key: str = "stage", lineage: tuple[Ancestor, ...] = (), section=ONLINE
) -> set[str]:
    groups = [failed_group(group_id=f"g{index}") for index in range(60)]
    with ReplayBuffer(state, section, stage_key=stage_key, lineage=lineage) as buffer:
        return {one.row.row_id for one in buffer.serve(groups, update=update, render=plain).groups.values()}


def test_an_update_sees_successes_of_the_updates_before_it_and_of_no_other(state: StateDir) -> None:
    store = TrajectoryStore(state)
    for update in range(3):
        store.write_episodes(f"stage-u{update:04d}", [rollout(f"e{update}", 1.0, update=update)])
    assert possible_rows(state, update=0) == set()
    assert possible_rows(state, update=1) == {"e0"}
    assert possible_rows(state, update=2) == {"e0", "e1"}, "a rerun of update 2 will replace what it left"


def test_a_stage_sees_successes_of_the_stages_it_descends_from_and_not_of_others(state: StateDir) -> None:
    store = TrajectoryStore(state)
    for stage_key in ("phase1", "stranger"):
        store.write_episodes(stage_key, [rollout(f"{stage_key}-e", 1.0, stage_key=stage_key, update=7)])
    assert possible_rows(state, update=0, lineage=(Ancestor("phase1"), Ancestor("sft"))) == {"phase1-e"}
    assert possible_rows(state, update=0, lineage=(Ancestor.parse("phase1-u0008"),)) == {"phase1-e"}
    assert possible_rows(state, update=0, lineage=(Ancestor.parse("phase1-u0007"),)) == set(), (
        "made after the milestone"
    )


def test_only_valid_successes_of_training_rollouts_are_replayed(state: StateDir) -> None:
    TrajectoryStore(state).write_episodes(
        "stage-u0000",
        [
            rollout("good", 1.0),
            rollout("failed", 0.0),
            rollout("fault", None),
            rollout("evaluated", 1.0, purpose=EpisodePurpose.EVALUATE),
            rollout("imported", 1.0, purpose=EpisodePurpose.IMPORT),
            rollout("partly", 0.6, outcome=Outcome.TRUNCATED),
            rollout("other", 1.0, task_id="u"),
        ],
    )
    assert possible_rows(state, update=1) == {"good"}
    assert possible_rows(state, update=1, section=ReplaySection()) == set(), "unless the recipe says so, none"


def test_an_episode_of_a_held_update_is_not_a_row_because_it_ran_again(state: StateDir) -> None:
    store = TrajectoryStore(state)
    won, held = (replace(rollout(name, 1.0), group_id=f"{name}-group") for name in ("won", "held"))
    groups = [group_of(one, group_id=f"{one.episode_id}-group") for one in (won, held)]
    store.write_episodes("stage-u0000", [won, held])
    store.write_groups("stage-u0000", [groups[0], replace(groups[1], status=GroupStatus.HELD)], [])
    assert possible_rows(state, update=1) == {"won"}


def test_demonstrations_and_successes_alternate_among_the_rows_of_a_task(state: StateDir) -> None:
    write_rows(state, *(make_row(f"d{index}", source_line=index) for index in range(5)))
    episodes = [rollout(f"e{index}", 1.0, started_at=float(index)) for index in range(5)]
    TrajectoryStore(state).write_episodes("stage-u0000", episodes)
    section = ReplaySection(include_online=True, per_task=3)
    assert possible_rows(state, update=1, section=section) == {"d0", "e4", "d1"}


def test_the_choice_after_a_kill_is_the_same_as_without_a_kill(state: StateDir) -> None:
    store = TrajectoryStore(state)
    write_rows(state, *(make_row(f"d{index}") for index in range(4)))
    groups = [failed_group(group_id=f"g{index}") for index in range(20)]

    def chosen(buffer: ReplayBuffer, update: int) -> list[str]:
        return [one.row.row_id for one in buffer.serve(groups, update=update, render=plain).groups.values()]

    uninterrupted = []
    with ReplayBuffer(state, ONLINE, stage_key="stage") as buffer:
        for update in range(4):
            uninterrupted.append(chosen(buffer, update))
            part = f"stage-u{update:04d}"
            store.write_episodes(part, [rollout(f"{part}-{n}", 1.0, update=update) for n in range(2)])
    assert any(row.startswith("stage-u") for row in uninterrupted[3])
    with ReplayBuffer(state, ONLINE, stage_key="stage") as resumed:
        assert [chosen(resumed, update) for update in (2, 3)] == uninterrupted[2:]


def test_compaction_changes_no_choice(state: StateDir) -> None:
    store = TrajectoryStore(state)
    for update in range(4):
        store.write_episodes(f"stage-u{update:04d}", [rollout(f"e{update}", 1.0, update=update)])
    before = possible_rows(state, update=3)
    assert compact_store(state, min_parts=2).num_parts == 4
    assert possible_rows(state, update=3) == before == {"e0", "e1", "e2"}


@pytest.fixture
def train(state: StateDir, renderer: Renderer) -> Callable[..., GspoBatch]:
    """One update: builds the batch and writes what happened, as the training program does."""
    store = TrajectoryStore(state)
    agent = AgentSection(max_context_tokens=512, max_response_tokens=64)
    render_row = RowRenderer(
        agent=agent,
        renderer=renderer,
        temperature=0.5,
        read_blob=store.read_blob,
        find_episode=store.find_episode,
    )

    def update(number: int, *groups: RolloutGroup) -> GspoBatch:
        with ReplayBuffer(state, ONLINE, stage_key="stage") as buffer:
            batch = build_batch(
                groups,
                update=number,
                replay=buffer,
                settings=ONLINE,
                render_row=render_row,
                read_blob=store.read_blob,
                min_valid=1,
            )
        part = f"stage-u{number:04d}"
        store.write_episodes(part, [episode for group in groups for episode in group.episodes])
        store.write_groups(part, batch.groups, batch.injections)
        return batch

    return update


@pytest.fixture
def success(state: StateDir, renderer: Renderer, noise_png: Callable[[int, int, int], bytes]):
    image = noise_png(64, 64, 3)
    TrajectoryStore(state).write_blob(image, suffix=".png")
    steps = tuple(make_step(index, sha256=digest_bytes(image)) for index in range(2))
    return rollout("won", 1.0, steps=steps, processor_digest=renderer.processor_digest)


def test_a_success_of_one_update_joins_a_later_one_and_sql_traces_it_back_to_its_pixels(
    state: StateDir, train: Callable[..., GspoBatch], success
) -> None:
    lost = rollout("lost", 0.0, steps=success.steps)
    first = train(0, group_of(success, lost))
    assert (first.injections, first.replay.num_failed) == ((), 0)
    second = train(1, group_of(replace(lost, episode_id="lost-again", update=1), group_id="h", update=1))
    (own, replayed) = second.trajectories
    assert (replayed.trajectory_id, replayed.is_replay) == ("h/replay:won", True)
    assert (replayed.token_ids,) == tuple(sequence.token_ids for sequence in success.sequences)
    assert (replayed.sampled_logprobs, replayed.policy_versions) == (None, None), (
        "the trainer takes its own: these are of an older policy"
    )
    assert len(replayed.images) == 2
    # Rewards 0 and 1: mean 1/2, standard deviation 1 / sqrt(2).
    assert (own.advantage, replayed.advantage) == pytest.approx((-0.7071, 0.7071), 1e-3)
    assert (second.replay.num_online, second.replay.num_verified) == (1, 1)
    with fresh_views(state) as views:
        rows = views.execute(PROVENANCE).fetchall()
        (replay_row_id,) = views.execute("SELECT replay_row_id FROM rollout_groups WHERE group_id = 'h'").fetchall()
    sha256 = success.steps[0].screenshot_sha256
    assert rows == [("episode", "uniform", 1.0, 2, "stage", 1, index, sha256) for index in range(2)]
    assert replay_row_id == ("won",)
    assert (state.blobs / sha256[:2]).is_dir()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"processor_digest": "another"}, "tokens of another processor"),
        ({"sequences": (make_sequence(600),)}, "600 tokens, more"),
        ({"steps": (make_step(0, sha256="e" * 64), make_step(1))}, "e" * 64),
        ({"task_digest": "x" * 64}, "before its config changed"),
        ({"sequences": ()}, "has no sampled tokens"),
    ],
)
def test_a_success_that_cannot_be_used_is_skipped_with_its_reason(
    state: StateDir, train: Callable[..., GspoBatch], success, changes: dict, reason: str
) -> None:
    TrajectoryStore(state).write_episodes("stage-u0000", [replace(success, **changes)])
    batch = train(1, group_of(rollout("again", update=1, steps=success.steps), group_id="h", update=1))
    (skipped,) = batch.skipped
    assert reason in skipped.reason
    assert (batch.injections, batch.replay.num_skipped) == ((), 1)
