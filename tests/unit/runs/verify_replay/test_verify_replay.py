"""Verdicts on fake desktops: which results count, what is retried, and what is never done twice."""

import asyncio
import io
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from PIL import Image
from raw_samples import config

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.grounds import Grounds
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.replay import ReplayVerification
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import ActionParseError, EnvServerError, EvaluatorError, ReplicaError, SetupError
from osworld_pipeline.protocols import DesktopInfo
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.verify_replay.journal import FOLDER, ROWS_PER_PART, VerificationJournal
from osworld_pipeline.runs.verify_replay.playback import PlaybackLimits, PlayedBack, play_back
from osworld_pipeline.runs.verify_replay.playback_plan import Playback, PlaybackPlan, PlayedTurn
from osworld_pipeline.runs.verify_replay.record import VerificationRecord, read_record
from osworld_pipeline.runs.verify_replay.summary import summarise
from osworld_pipeline.runs.verify_replay.verify_replay import Verifier
from osworld_pipeline.tables.replay.rows import ReplayCoverage

GROUNDS = Grounds(image_digest="image-1", grader_version="grader-1")
COVERAGE = ReplayCoverage(num_tasks=2, missing=(), unverified=("t2",))
TYPE = {"action": "type", "text": "x"}
DONE = {"action": "terminate", "status": "success"}


def screenshot() -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (64, 32)).save(sink, "PNG")
    return sink.getvalue()


class FakeDesktop:
    """Grades with the given score; an exception is raised instead, in the call named by `at`."""

    def __init__(self, word: float | Exception, *, at: str = "score", grounds: Grounds = GROUNDS):
        self.commands: list[str] = []
        self.pauses_s: list[float] = []
        self.num_closed = 0
        self._word, self._at, self._grounds = word, at, grounds

    async def reset(self, task: Task, *, record_id: str = "") -> tuple[Observation, DesktopInfo]:
        self._fail("reset")
        info = DesktopInfo(replica_id="r0", provider="fake", **asdict(self._grounds))
        return Observation(screenshot=screenshot()), info

    async def act(self, command: str, *, pause_s: float, note: str = "") -> Observation:
        self._fail("act")
        self.commands.append(command)
        self.pauses_s.append(pause_s)
        return Observation(screenshot=screenshot())

    async def score(self) -> float:
        self._fail("score")
        assert isinstance(self._word, float)
        return self._word

    async def close(self) -> None:
        self.num_closed += 1

    def _fail(self, where: str) -> None:
        if isinstance(self._word, Exception) and self._at == where:
            raise self._word


def playback(row_id: str = "r1", *, task_id: str = "t1", turns: tuple[dict[str, Any], ...] = (TYPE, DONE)) -> Playback:
    played = tuple(PlayedTurn(dialect="slime", arguments=arguments) for arguments in turns)
    return Playback(row_ids=(row_id,), task_id=task_id, source="bc_sft: a.jsonl:1", turns=played)


def plan_of(*playbacks: Playback) -> PlaybackPlan:
    tasks = {name: Task.from_config(config(name)) for name in ("t1", "t2")}
    return PlaybackPlan(playbacks=playbacks, tasks=tasks, unplayable={})


def recipe_of(**replay: Any) -> Recipe:
    data = load_recipe("smoke").model_dump(mode="json")
    changes = {"verify": "all", **replay}
    return Recipe.model_validate(
        {**data, "desktop": {**data["desktop"], "num_replicas": 1}, "replay": {**data["replay"], **changes}}
    )


class Bench:
    """A verifier over fakes: hands out the desktops in the order given."""

    def __init__(
        self, *words: float | Exception | FakeDesktop, record: VerificationRecord | None = None, **replay: Any
    ):
        self.desktops = [word if isinstance(word, FakeDesktop) else FakeDesktop(word) for word in words]
        self.used: list[FakeDesktop] = []
        self.record = record or VerificationRecord()
        self.written: list[ReplayVerification] = []
        self.recipe = recipe_of(**replay)

    async def run(self, plan: PlaybackPlan, *, grounds: frozenset[Grounds] | None = frozenset({GROUNDS})) -> Any:
        async def play(playback: Playback, task: Task, pause_s: float) -> PlayedBack:
            self.used.append(self.desktops.pop(0))
            return await play_back(
                playback, task, desktop=self.used[-1], pause_s=pause_s, threshold=self.recipe.replay.threshold,
                limits=PlaybackLimits(),
            )  # fmt: skip

        verifier = Verifier(
            plan,
            self.record,
            grounds=grounds,
            recipe=self.recipe,
            play=play,
            write=self.written.extend,
        )
        await verifier.run(lambda message: None)
        return summarise(plan, self.record, grounds, recipe=self.recipe, coverage=COVERAGE)


async def test_a_playback_that_earns_the_threshold_is_verified_at_once() -> None:
    bench = Bench(1.0)
    summary = await bench.run(plan_of(playback()))
    assert (summary.num_verified, summary.num_failed, summary.num_open) == (1, 0, 0)
    (row,) = bench.written
    assert (row.row_id, row.outcome, row.reward, row.num_steps) == ("r1", Outcome.SUCCESS, 1.0, 2)
    assert (row.provider, row.image_digest, row.grader_version) == ("fake", "image-1", "grader-1")
    assert bench.used[0].commands == ['pyautogui.write("x")', "DONE"]


async def test_a_failure_counts_only_after_all_attempts_each_with_longer_pauses() -> None:
    bench = Bench(0.0, 0.25, num_verification_attempts=2)
    summary = await bench.run(plan_of(playback()))
    assert (summary.num_verified, summary.num_failed) == (0, 1)
    assert summary.failed[0].earned == (0.0, 0.25)
    assert [desktop.pauses_s[0] for desktop in bench.used] == [0.1, 0.2]


async def test_one_success_among_the_attempts_is_enough() -> None:
    bench = Bench(0.0, 1.0, num_verification_attempts=3)
    assert (await bench.run(plan_of(playback()))).num_verified == 1
    assert [row.outcome for row in bench.written] == [Outcome.FAILURE, Outcome.SUCCESS]


@pytest.mark.parametrize(
    ("fault", "at", "outcome"),
    [
        (ReplicaError("the desktop died"), "act", Outcome.ENV_FAULT),
        (SetupError("no such file"), "reset", Outcome.ENV_FAULT),
        (EvaluatorError("the grader crashed"), "score", Outcome.GRADER_FAULT),
    ],
)
async def test_a_fault_is_recorded_without_a_reward_and_tried_on_another_replica(fault, at, outcome) -> None:
    bench = Bench(FakeDesktop(fault, at=at), FakeDesktop(fault, at=at), 1.0)
    summary = await bench.run(plan_of(playback()))
    assert [(row.outcome, row.reward) for row in bench.written] == [
        (outcome, None),
        (outcome, None),
        (Outcome.SUCCESS, 1.0),
    ]
    assert (summary.num_verified, summary.num_failed, summary.num_faults) == (1, 0, 2)
    assert len({row.verification_id for row in bench.written}) == 3
    assert all(desktop.num_closed == 1 for desktop in bench.used)


async def test_faults_never_add_up_to_a_failure() -> None:
    budget = recipe_of().replay.num_verification_attempts + recipe_of().gspo.max_env_attempts - 1
    grader = [FakeDesktop(EvaluatorError("the grader crashed")) for _ in range(budget)]
    bench = Bench(*grader)
    summary = await bench.run(plan_of(playback()))
    assert (summary.num_verified, summary.num_failed, summary.num_open) == (0, 0, 1)
    assert summary.num_faults == budget

    again = Bench(1.0, record=bench.record)
    assert (await again.run(plan_of(playback()))).num_verified == 1
    assert not {row.verification_id for row in again.written} & {row.verification_id for row in bench.written}


async def test_nothing_but_env_faults_is_an_error_that_quotes_the_first() -> None:
    bench = Bench(*(FakeDesktop(ReplicaError("no bwrap here"), at="reset") for _ in range(9)))
    with pytest.raises(EnvServerError, match=r"all \d playbacks ended in an env_fault; the first: no bwrap here"):
        await bench.run(plan_of(playback()))


async def test_one_task_that_cannot_be_set_up_does_not_fail_a_buffer_that_is_verified() -> None:
    bench = Bench(1.0, *(FakeDesktop(SetupError("no network"), at="reset") for _ in range(9)))
    summary = await bench.run(plan_of(playback("r1"), playback("r2", task_id="t2")))
    assert (summary.num_verified, summary.num_open) == (1, 1)


async def test_an_env_server_that_is_gone_ends_the_run_with_its_own_error() -> None:
    bench = Bench(FakeDesktop(EnvServerError("no env server answers"), at="reset"))
    with pytest.raises(EnvServerError, match="no env server answers"):
        await bench.run(plan_of(playback()))
    assert bench.used[0].num_closed == 1
    assert bench.written == []


async def test_a_known_result_is_played_again_only_under_another_grader_or_image_or_task() -> None:
    bench = Bench(1.0, 0.0, 0.0)
    plan = plan_of(playback("r1"), playback("r2"))
    await bench.run(plan)

    silent = Bench(record=bench.record)
    await silent.run(plan)
    await silent.run(plan, grounds=None)
    assert silent.written == []

    newer = Grounds(image_digest="image-1", grader_version="grader-2")
    regraded = Bench(*(FakeDesktop(1.0, grounds=newer) for _ in range(2)), record=bench.record)
    summary = await regraded.run(plan, grounds=frozenset({newer}))
    assert (summary.num_verified, len(regraded.written)) == (2, 2)

    changed = PlaybackPlan(
        playbacks=plan.playbacks,
        tasks={**plan.tasks, "t1": Task.from_config(config("t1", instruction="Another one."))},
        unplayable={},
    )
    second = Bench(1.0, 1.0, record=bench.record)
    await second.run(changed)
    assert len(second.written) == 2


async def test_a_desktop_that_differs_from_what_its_server_reports_does_not_block_the_run() -> None:
    other = Grounds(image_digest="image-2", grader_version="grader-1")
    bench = Bench(*(FakeDesktop(1.0, grounds=other) for _ in range(9)))
    assert (await bench.run(plan_of(playback()))).num_open == 1


async def test_a_refused_action_is_skipped_and_reported() -> None:
    class Refusing(FakeDesktop):
        async def act(self, command: str, *, pause_s: float, note: str = "") -> Observation:
            if command.startswith("pyautogui"):
                raise ActionParseError("not here")
            return await super().act(command, pause_s=pause_s)

    bench = Bench(Refusing(0.0), Refusing(0.0))
    summary = await bench.run(plan_of(playback()))
    assert bench.written[0].num_steps == 1
    assert summary.failed[0].error == "the desktop refused action 0: not here"


async def test_what_follows_the_end_of_the_episode_is_not_carried_out() -> None:
    bench = Bench(1.0)
    await bench.run(plan_of(playback(turns=(DONE, TYPE))))
    assert bench.used[0].commands == ["DONE"]


@pytest.mark.parametrize(("slow", "outcome"), [("act", Outcome.TIMEOUT), ("score", Outcome.GRADER_FAULT)])
async def test_every_wait_has_a_limit(slow: str, outcome: Outcome) -> None:
    class Slow(FakeDesktop):
        async def act(self, command: str, *, pause_s: float, note: str = "") -> Observation:
            await asyncio.sleep(9 if slow == "act" else 0)
            return await super().act(command, pause_s=pause_s)

        async def score(self) -> float:
            await asyncio.sleep(9 if slow == "score" else 0)
            return 1.0

    desktop = Slow(1.0)
    limits = PlaybackLimits(reset_s=5, actions_s=0.05, evaluate_s=0.05)
    played = await play_back(
        playback(), Task.from_config(config("t1")), desktop=desktop, pause_s=0, threshold=0.5, limits=limits
    )
    assert (played.outcome, played.reward, desktop.num_closed) == (outcome, None, 1)


def verification(number: int) -> ReplayVerification:
    return ReplayVerification(
        verification_id=f"v{number}", row_id=f"r{number}", task_id="t1", task_digest="d", outcome=Outcome.SUCCESS,
        reward=1.0, started_at=float(number),
    )  # fmt: skip


def parts_of(state: StateDir) -> list[str]:
    return [path.name for path in (state.trajectories / "replay_verifications").glob("verify-*.parquet")]


def ids_in(state: StateDir) -> list[str]:
    return sorted(one.verification_id for one in read_record(state))


def test_many_playbacks_make_few_parts_and_each_is_on_the_disk_at_once(tmp_path) -> None:
    state = StateDir(tmp_path)
    num_rows = 2 * ROWS_PER_PART + 1
    with VerificationJournal(state) as journal:
        for number in range(num_rows):
            journal.write([verification(number)])
        (path,) = (state.trajectories / FOLDER).glob("*.jsonl")
        assert [json.loads(line)["verification_id"] for line in path.read_text().splitlines()] == [f"v{num_rows - 1}"]
    assert len(parts_of(state)) == 3
    assert len(ids_in(state)) == num_rows
    assert not list((state.trajectories / FOLDER).iterdir())


@pytest.fixture
def killed(tmp_path) -> Callable[..., StateDir]:
    """A state whose last run was killed: its journal is left over, and no process holds it."""

    def make(*, tail: str = "") -> StateDir:
        state = StateDir(tmp_path)
        folder = state.trajectories / FOLDER
        folder.mkdir(parents=True)
        lines = [json.dumps(asdict(verification(number))) for number in range(2)]
        (folder / "dead.jsonl").write_text("\n".join(lines) + "\n" + tail)
        return state

    return make


@pytest.mark.parametrize("tail", ["", '{"verification_id": "v2", "row'])
def test_results_that_a_killed_run_had_finished_are_stored_by_the_next_run(killed, tail: str) -> None:
    state = killed(tail=tail)
    with VerificationJournal(state):
        assert ids_in(state) == ["v0", "v1"]
    assert not list((state.trajectories / FOLDER).iterdir())


def test_a_run_killed_between_its_part_and_its_journal_leaves_nothing_twice(killed) -> None:
    state = killed()
    journal = (state.trajectories / FOLDER / "dead.jsonl").read_text()
    with VerificationJournal(state):
        pass
    (state.trajectories / FOLDER / "dead.jsonl").write_text(journal)
    with VerificationJournal(state):
        pass
    assert ids_in(state) == ["v0", "v1"]


def test_the_journal_of_an_active_run_is_left_alone(tmp_path) -> None:
    state = StateDir(tmp_path)
    with VerificationJournal(state) as first:
        first.write([verification(1)])
        with VerificationJournal(state):
            assert ids_in(state) == []
        first.write([verification(2)])
    assert ids_in(state) == ["v1", "v2"]
