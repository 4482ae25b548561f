"""A recipe at smoke size: all its stages, with a tiny model, at most two families with two training tasks each, and at
most four updates of a stage."""

from collections.abc import Mapping
from typing import Any

from osworld_pipeline.recipes.schema import Recipe

FAMILIES = {
    "desktop_basics": ("rename_folder", "click_button"),
    "desktop_shortcuts": ("write_file", "choose_in_dialog"),
    "windows_basics": ("notepad_sentence", "cmd_echo"),
    "wine_basics": ("notepad_sentence", "cmd_echo"),
}
"""Families of each suite, if a recipe names none."""
SIZES: Mapping[str, Mapping[str, Any]] = {
    "suite": {"num_train": 2, "num_heldout": 1},
    "desktop": {
        "server_urls": [],
        "num_replicas": 2,
        "screen_width": 512,
        "screen_height": 320,
        "pause_s": 0.1,
        "settle": "adaptive",
    },
    "agent": {"max_response_tokens": 32, "max_context_tokens": 2048, "max_pixels": 16_384, "system_prompt": "short"},
    "engine": {"kind": "transformers", "urls": [], "launch": None, "model": ""},
    "trainer": {"max_tokens_per_batch": 4096, "cpu_offload": False},
    "sft": {"num_updates": 4, "batch_size": 2, "learning_rate": 1e-3, "warmup_updates": 1, "save_every": 2},
    "gspo": {
        "group_size": 2,
        "tasks_per_update": 1,
        "learning_rate": 1e-5,
        "episode_timeout_s": 60.0,
        "turn_timeout_s": 30.0,
    },
    "rollout": {"max_concurrent_episodes": None, "min_valid_episodes": 2},
    "replay": {"import_file": None, "verification_sample": 2},
    "flywheel": {"samples_per_task": 2, "max_tasks": 2, "num_updates": 2},
}
AT_MOST: Mapping[str, Mapping[str, int]] = {
    "agent": {"max_turns": 2, "a11y_max_length": 200},
    "engine": {"max_batch": 4},
    "trainer": {"num_processes": 2},
    "gspo": {"micro_batch_size": 2, "minibatches_per_update": 2, "epochs_per_update": 2},
    "flywheel": {"num_rounds": 1},
    "evaluation": {"max_turns": 2},
}
MODEL = {"kind": "tiny", "hidden_size": 64, "num_layers": 2, "vision_hidden_size": 48, "vision_depth": 1}


def shrink(recipe: Recipe) -> Recipe:
    """A small copy of a recipe with the same dialect, context and rollout mode, algorithm, reward, replay and adapters.
    An engine that needs servers is replaced by the one in process."""
    data = recipe.model_dump(mode="json")
    for section, values in SIZES.items():
        data[section] |= values
    for section, limits in AT_MOST.items():
        data[section] |= {key: min(limit, data[section][key]) for key, limit in limits.items()}
    data["model"] = MODEL
    data["suite"]["families"] = list(recipe.suite.families[:2] or FAMILIES[recipe.suite.name])
    data["evaluation"]["seeds"] = list(recipe.evaluation.seeds[:1])
    for phase in ("phase1", "phase2"):
        data["gspo"][phase]["num_updates"] = min(2, data["gspo"][phase]["num_updates"])
    if data["trainer"]["lora"] is not None:
        data["trainer"]["lora"]["rank"] = min(4, data["trainer"]["lora"]["rank"])
    return Recipe.model_validate(data)
