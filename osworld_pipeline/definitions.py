"""Combines assets, jobs and resources into the one code location. Imports neither torch nor transformers."""

import os

import dagster as dg

from osworld_pipeline.domain.top_level_names import use_own_packages

use_own_packages()

from assets import checkpoints, checks, evaluations, raw, replay, tables, upkeep
from assets.policies import under_policies
from jobs.compaction import compaction_schedule
from jobs.failures import failed_runs
from jobs.pipeline import JOBS
from jobs.retraining import CRON_VARIABLE, DEFAULT_CRON, build_retraining_schedule, retraining_is_due
from jobs.sensors import SENSORS
from osworld_pipeline.domain.state import REMOTE_VARIABLE
from osworld_pipeline.recipes.environment import own_variables
from resources.desktops import DesktopsResource
from resources.engine import EngineResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.start import StartResource
from resources.state import RecipeResource, StateResource, configured_state
from resources.tracking import TrackingResource

environment = own_variables(os.environ)
"""Read once, here, and passed to the library."""


def secret(variable: str) -> dg.EnvVar | None:
    """Dagster stores the name of the variable and reads its value on use; None if it is not set."""
    return dg.EnvVar(variable) if os.environ.get(variable) else None


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
    schedules=[build_retraining_schedule(os.environ.get(CRON_VARIABLE) or DEFAULT_CRON), compaction_schedule],
    sensors=[*SENSORS, failed_runs, retraining_is_due],
    resources={
        "state": StateResource(path=configured_state(), remote=os.environ.get(REMOTE_VARIABLE, "")),
        "recipe": RecipeResource(environment=environment),
        "desktops": DesktopsResource(token=secret("ENV_SERVER_TOKEN")),
        "engine": EngineResource(token=secret("ENGINE_TOKEN")),
        "tracking": TrackingResource(),
        "launcher": Launcher(),
        "progress": ProgressResource(),
        "start": StartResource(),
    },
    executor=dg.in_process_executor,
)
