"""The state folder of a pipeline (`var/`); all paths below it are defined here."""

from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_STATE = "var"
"""Relative to the working directory."""
STATE_VARIABLE = "OSWORLD_STATE"
"""The environment variable that names another state, for commands and for Dagster."""
REMOTE_VARIABLE = "OSWORLD_STATE_REMOTE"
"""The environment variable that names a state's object store, as s3://BUCKET/PREFIX."""


@dataclass(frozen=True)
class StateDir:
    root: Path
    name: str = field(default="", compare=False)
    """The state's name from the host that started the run, set where the folder may be mounted at another path; else
    empty."""

    @property
    def catalog(self) -> Path:
        """The DuckDB file for queries; rebuilt as a new file and swapped in, so readers do not wait."""
        return self.root / "osworld.duckdb"

    @property
    def tables(self) -> Path:
        """One Parquet file for each small table that an asset owns; the catalog is built from them."""
        return self.root / "tables"

    @property
    def trajectories(self) -> Path:
        """Append-only Parquet parts, one folder for each table: episodes/, steps/, sequences/, rollout_groups/,
        injections/, replay_verifications/, updates/, stage_attempts/."""
        return self.root / "trajectories"

    @property
    def blobs(self) -> Path:
        """Images by content: blobs/ab/ab12...png."""
        return self.root / "blobs"

    @property
    def datasets(self) -> Path:
        """The raw sources of Slime-OSWorld: osworld_datasets/, osworld-merged-replay/."""
        return self.root / "datasets"

    @property
    def imports(self) -> Path:
        """Imported demonstrations, one folder each: demonstrations.jsonl, tasks.jsonl, images/, source.json."""
        return self.datasets / "imports"

    @property
    def osworld_repo(self) -> Path:
        """Tasks as an OSWorld tree: evaluation_examples/examples/<domain>/<id>.json."""
        return self.root / "osworld"

    @property
    def suites(self) -> Path:
        """Evaluation suites of the user's own, one JSON file each."""
        return self.root / "suites"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    @property
    def mlflow_db(self) -> Path:
        return self.root / "mlflow" / "mlflow.db"

    @property
    def mlflow_uri(self) -> str:
        return f"sqlite:///{self.mlflow_db}"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def program_log(self, program: str) -> Path:
        """The output of all runs of a program, appended."""
        return self.logs / f"{program}.log"

    @property
    def launches(self) -> Path:
        """Mailboxes between launchers and programs on other machines; empty when none runs."""
        return self.root / "launches"

    @property
    def clients(self) -> Path:
        """The identity of this state at env servers, and its connected programs."""
        return self.root / "clients"

    @property
    def metrics_targets(self) -> Path:
        """A file for each process that serves metrics at a free port, for Prometheus (`file_sd_configs`)."""
        return self.root / "metrics" / "targets"

    @property
    def own_servers(self) -> Path:
        """A file for each running env server that a program of this state has started for itself."""
        return self.root / "env-servers"

    @property
    def desktops(self) -> Path:
        """Base image and replicas of the local provider."""
        return self.root / "desktops"
