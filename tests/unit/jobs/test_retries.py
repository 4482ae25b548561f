"""Which runs a daemon starts again when their process was lost."""

import pytest

from jobs.pipeline import JOBS
from osworld_pipeline.cli.in_process.session import MAX_RETRIES_TAG
from osworld_pipeline.definitions import defs


@pytest.mark.parametrize("name", sorted(job.name for job in JOBS))
def test_every_named_job_leaves_retries_to_the_instance(name: str) -> None:
    assert MAX_RETRIES_TAG not in defs.resolve_job_def(name).tags
