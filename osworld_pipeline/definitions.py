"""Puts assets, jobs and resources together: the one code location. Imports neither torch nor transformers."""

import dagster as dg

from assets import checkpoints, evaluations, raw, tables
from jobs.pipeline import JOBS
from resources.desktops import DesktopsResource
from resources.launcher import LocalLauncher
from resources.progress import ProgressResource
from resources.state import RecipeResource, StateResource
from resources.tracking import TrackingResource

defs = dg.Definitions(
    assets=[*raw.ASSETS, *tables.ASSETS, *checkpoints.ASSETS, *evaluations.ASSETS],
    asset_checks=[*tables.CHECKS, *checkpoints.CHECKS],
    jobs=JOBS,
    resources={
        "state": StateResource(),
        "recipe": RecipeResource(),
        "desktops": DesktopsResource(),
        "tracking": TrackingResource(),
        "launcher": LocalLauncher(),
        "progress": ProgressResource(),
    },
    executor=dg.in_process_executor,
)
