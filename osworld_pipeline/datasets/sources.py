"""The table of Slime-OSWorld's raw sources: names, paths, and the rank that decides between equal demonstrations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from osworld_pipeline.domain.state import StateDir

SourceKind = Literal["demonstrations", "task_ids", "task_table", "task_tree"]


@dataclass(frozen=True, kw_only=True)
class Source:
    name: str
    path: str
    """Relative to the datasets folder; for a tree, relative to the state folder."""
    kind: SourceKind
    description: str
    quality_rank: int = -1
    """The demonstration with the higher rank is kept if two are equal."""
    has_config: bool = False

    def locate(self, state: StateDir) -> Path:
        return state.osworld_repo if self.kind == "task_tree" else state.datasets / self.path


def _demonstrations(name: str, path: str, quality_rank: int, description: str) -> Source:
    return Source(
        name=name,
        path=f"osworld_datasets/{path}",
        kind="demonstrations",
        quality_rank=quality_rank,
        description=description,
    )


def _tasks(name: str, path: str, description: str, *, has_config: bool = True) -> Source:
    return Source(name=name, path=path, kind="task_table", has_config=has_config, description=description)


REPLAY_SOURCES = (
    _demonstrations(
        "sft_curated_final",
        "osworld-sft-curated-final/osworld_sft_curated_final.jsonl",
        5,
        "Demonstrations, curated, final round",
    ),
    _demonstrations(
        "sft_curated_v3",
        "osworld-sft-curated-v3/osworld_sft_curated.jsonl",
        4,
        "Demonstrations, curated, third round",
    ),
    _demonstrations("sft_hybrid", "osworld-sft-hybrid/osworld_sft_hybrid.jsonl", 3, "Demonstrations, hybrid set"),
    _demonstrations("combined_sft", "osworld-combined-sft/osworld_combined_sft.jsonl", 2, "Demonstrations, combined"),
    _demonstrations("sft_clean", "osworld-sft-clean/osworld_sft_clean.jsonl", 1, "Demonstrations, cleaned"),
    _demonstrations("bc_sft", "osworld-bc-sft/bc_sft_train_vlm_split_fixed.jsonl", 0, "Demonstrations, cloning set"),
)
TASK_SOURCES = (
    Source(
        name="exploratory_rollouts",
        path="osworld_datasets/osworld-exploratory-rollouts/all_rollouts.jsonl",
        kind="task_ids",
        description="Exploratory rollouts, of which only the task ids are used",
    ),
    _tasks("distill_train", "osworld_datasets/osworld-vlm-distill-data/train.parquet", "Task configs, training half"),
    _tasks("distill_test", "osworld_datasets/osworld-vlm-distill-data/test.parquet", "Task configs, test half"),
    _tasks(
        "variance_subset",
        "osworld_datasets/osworld-variance-subset/train_variance_subset.parquet",
        "Task configs of tasks whose outcome varies",
    ),
    _tasks("gspo_tasks", "osworld-merged-replay/osworld_gspo_tasks.parquet", "Task ids for GSPO", has_config=False),
    _tasks(
        "gspo_tasks_aligned",
        "osworld-merged-replay/osworld_gspo_tasks_aligned.parquet",
        "Task ids for GSPO, aligned with the replay",
        has_config=False,
    ),
    Source(name="osworld_repo", path="osworld", kind="task_tree", has_config=True, description="The OSWorld task tree"),
)
