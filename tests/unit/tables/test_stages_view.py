"""The view of the training stages."""

import time
from pathlib import Path

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.stage_record import AttemptStatus, StageAttempt, TrainingStage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import fresh_views


def test_a_resume_on_a_host_whose_clock_is_behind_is_the_last_attempt(tmp_path: Path) -> None:
    state, now = StateDir(tmp_path), time.time()
    store = TrajectoryStore(state)
    stage = TrainingStage(stage_key="gspo-1", stage=Stage.GSPO_PHASE1, parent_id="sft-1", num_planned=20)
    for name, first_update, started_at, status, host in (
        ("first", 1, now, AttemptStatus.FAILED, "early"),
        ("resumed", 9, now - 3_600, AttemptStatus.RUNNING, "late"),
    ):
        store.write_attempt(
            StageAttempt(
                attempt_id=name,
                stage=stage,
                first_update=first_update,
                status=status,
                host=host,
                process_id=1,
                started_at=started_at,
            )
        )
    with fresh_views(state) as connection:
        assert connection.execute("SELECT status, host, num_attempts FROM stages").fetchall() == [
            ("running", "late", 2)
        ]
