"""Verifies the replay buffer: re-executes demonstrations on real desktops and records the actual rewards. Results for
the same desktop image and grader are reused, so a killed run resumes."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.grounds import Grounds
from osworld_pipeline.domain.replay import ReplayVerification
from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.messages import Progress, Report
from osworld_pipeline.runs.verify_replay.job import VerificationJob
from osworld_pipeline.runs.verify_replay.journal import VerificationJournal
from osworld_pipeline.runs.verify_replay.playback import Play
from osworld_pipeline.runs.verify_replay.playback_plan import Playback, PlaybackPlan, chosen_playbacks, plan_playbacks
from osworld_pipeline.runs.verify_replay.player import open_player
from osworld_pipeline.runs.verify_replay.record import (
    Verdict,
    VerificationRecord,
    read_record,
    verifications_of,
)
from osworld_pipeline.runs.verify_replay.summary import VerificationSummary, summarise, write_summary
from osworld_pipeline.tables.replay.rows import replay_coverage


def main(job: VerificationJob, report: Report) -> dict[str, Any]:
    """Result: the number of demonstrations by verdict."""
    with VerificationJournal(job.state) as journal:
        summary = asyncio.run(_verify(job, journal, report))
    write_summary(job.state, summary)
    return {"num_verified": summary.num_verified, "num_failed": summary.num_failed, "num_open": summary.num_open}


async def _verify(job: VerificationJob, journal: VerificationJournal, report: Report) -> VerificationSummary:
    recipe, state = job.recipe, job.state
    plan = await asyncio.to_thread(plan_playbacks, state, min_reward=recipe.replay.threshold)
    record = await asyncio.to_thread(read_record, state)
    async with open_player(job) as player:
        verifier = Verifier(plan, record, grounds=player.grounds, recipe=recipe, play=player.play, write=journal.write)
        await verifier.run(report)
    await asyncio.to_thread(journal.flush)
    coverage = await asyncio.to_thread(replay_coverage, state, sorted(plan.tasks), recipe.replay)
    return summarise(plan, record, player.grounds, recipe=recipe, coverage=coverage, key=job.key)


class Verifier:
    """Plays unsettled demonstrations, one per replica in parallel. Each result is on disk, in the journal, before the
    same replica plays again."""

    def __init__(
        self,
        plan: PlaybackPlan,
        record: VerificationRecord,
        *,
        grounds: Collection[Grounds] | None,
        recipe: Recipe,
        play: Play,
        write: Callable[[Sequence[ReplayVerification]], None],
    ) -> None:
        """`grounds`: images and graders of the desktops; None if a server does not report them, and then every score
        counts."""
        self._plan, self._record, self._recipe = plan, record, recipe
        self._grounds, self._play, self._write = grounds, play, write
        self._writing = asyncio.Lock()

    async def run(self, report: Report) -> None:
        """Raises EnvServerError if the env server is unreachable, or if all playbacks of this run ended in env_faults
        and no selected demonstration has a verdict."""
        chosen = chosen_playbacks(self._plan, self._recipe)
        queue = [playback for playback in chosen if self._verdict(playback) is Verdict.OPEN]
        open_now, tries = iter(queue), list[ReplayVerification]()

        async def work() -> None:
            for playback in open_now:
                await self._settle(playback, tries)
                report(self._progress(chosen))

        report(self._progress(chosen))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._recipe.desktop.num_replicas, len(queue))):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            # One error ended the run; the others are consequences.
            raise failures.exceptions[0] from failures
        is_all_open = all(self._verdict(playback) is Verdict.OPEN for playback in chosen)
        if tries and is_all_open and all(one.outcome is Outcome.ENV_FAULT for one in tries):
            raise EnvServerError(f"all {len(tries)} playbacks ended in an env_fault; the first: {tries[0].error}")

    async def _settle(self, playback: Playback, tries: list[ReplayVerification]) -> None:
        """Tries until there is a verdict or the fault budget is spent; adds to `tries`. A try after a failed one makes
        longer pauses, so that a busy machine does not look like a bad demonstration."""
        task, recipe = self._plan.tasks[playback.task_id], self._recipe
        num_graded = 0
        # The loop is limited: if a desktop's image or grader is not in `grounds`, its scores never give a verdict.
        for _ in range(recipe.replay.num_verification_attempts + recipe.gspo.max_env_attempts - 1):
            played = await self._play(playback, task, recipe.desktop.pause_s * (1 + num_graded))
            rows = verifications_of(playback, task, played, index=self._record.next_index(playback))
            async with self._writing:
                await asyncio.to_thread(self._write, rows)
            self._record.add(rows)
            tries.append(rows[0])
            num_graded += played.outcome.is_valid
            if self._verdict(playback) is not Verdict.OPEN:
                return

    def _verdict(self, playback: Playback) -> Verdict:
        return self._record.verdict(
            playback,
            self._plan.tasks[playback.task_id],
            self._grounds,
            num_attempts=self._recipe.replay.num_verification_attempts,
        )

    def _progress(self, chosen: Sequence[Playback]) -> Progress:
        verdicts = Counter(self._verdict(playback) for playback in chosen)
        note = f"{verdicts[Verdict.VERIFIED]} verified, {verdicts[Verdict.FAILED]} failed"
        return Progress(done=len(chosen) - verdicts[Verdict.OPEN], total=len(chosen), note=note)
