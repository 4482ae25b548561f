"""Combines assets, jobs and resources into the one code location. Imports neither torch nor transformers."""

import os

import dagster as dg

from osworld_pipeline.domain.top_level_names import use_own_packages

use_own_packages()

from assets import checkpoints, checks, evaluations, raw, replay, tables, upkeep
from assets.policies import under_policies
from jobs import definitions_of
from jobs.pipeline import JOBS
from resources.catalog_tables import catalog_tables
from resources.deployment import deployment_resources
from resources.progress import ProgressResource
from resources.start import StartResource

defs = dg.Definitions(
    assets=under_policies(
        [
            *raw.ASSETS,
            *tables.ASSETS,
            *replay.ASSETS,
            *checkpoints.ASSETS,
            *evaluations.ASSETS,
            *upkeep.ASSETS,
        ]
    ),
    asset_checks=[*checks.CHECKS, *checkpoints.CHECKS],
    jobs=JOBS,
    schedules=definitions_of(dg.ScheduleDefinition),
    sensors=definitions_of(dg.SensorDefinition),
    resources={
        # Read once, here, and passed to the library.
        **deployment_resources(os.environ),
        "progress": ProgressResource(),
        "start": StartResource(),
        "catalog_tables": catalog_tables,
    },
    executor=dg.in_process_executor,
)
