"""What a recipe may say. Unknown keys are refused, contradictions are refused on load, there are no aliases."""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.errors import RecipeError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def digest(self) -> str:
        return digest_json(self.model_dump(mode="json"))


class SuiteSection(Section):
    """The built-in task suite: families x instances, split by instance."""

    name: Literal["desktop_basics"] = "desktop_basics"
    seed: int = 0
    families: tuple[str, ...] = ()
    """Empty: all of them."""
    num_train: int = Field(default=12, ge=1)
    """Training instances of each family."""
    num_heldout: int = Field(default=3, ge=1)


class DesktopSection(Section):
    """How many desktops, and how they look."""

    num_replicas: int = Field(default=2, ge=1)
    screen_width: int = Field(default=1920, ge=64)
    screen_height: int = Field(default=1080, ge=64)
    pause_s: float = Field(default=0.5, ge=0)
    """Seconds to let the screen settle after an action."""
    require_a11y_tree: bool = True
    require_terminal: bool = False


class TinyModelSection(Section):
    """A Qwen3-VL of a few million parameters with random weights and a tokenizer of its own."""

    kind: Literal["tiny"]
    hidden_size: int = 128
    num_layers: int = 4
    vision_hidden_size: int = 96
    vision_depth: int = 2
    vocab_size: int = 2048
    seed: int = 0


class PretrainedModelSection(Section):
    """A published Qwen3-VL: a local folder, or a hub id with its revision."""

    kind: Literal["pretrained"]
    path: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class AgentSection(Section):
    """What the model sees and says."""

    dialect: Literal["slime"] = "slime"
    context_mode: Literal["append"] = "append"
    max_turns: int = Field(default=8, ge=1)
    max_response_tokens: int = Field(default=400, ge=8)
    max_context_tokens: int = Field(default=8192, ge=128)
    max_pixels: int = Field(default=1_003_520, ge=1024)
    """Screenshots are shrunk to at most this many pixels, sides divisible by 32."""
    a11y_max_length: int = Field(default=4096, ge=0)
    system_prompt: Literal["full", "short"] = "full"
    """`short` spares a tiny model the manual; its action grammar is the same."""


class RewardSection(Section):
    """Spec 01, "Step signals and reward"."""

    alpha: float = Field(default=0.3, ge=0)
    action_parse_valid: float = 0.10
    action_executed: float = 0.15
    a11y_grounding: float = 0.30
    tool_calling: float = 0.25
    efficiency: float = 0.05
    screen_change: float = 0.05
    a11y_change: float = 0.05
    terminal_change: float = 0.05
    screen_diff_threshold: float = 0.005
    complexity: Literal["low", "medium", "high"] = "low"


class SftSection(Section):
    num_updates: int = Field(ge=1)
    batch_size: int = Field(default=8, ge=1)
    learning_rate: float = Field(gt=0)
    warmup_updates: int = 20
    final_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Cosine decay ends at this share of the learning rate."""
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    save_every: int = Field(default=100, ge=1)
    seed: int = 0


class GspoSharedSection(Section):
    """Spec 01's GSPO configuration; formula in training/loss.py."""

    group_size: int = Field(default=4, ge=2)
    tasks_per_update: int = Field(default=4, ge=1)
    learning_rate: float = Field(default=5e-7, gt=0)
    clip_low: float = Field(default=3.5e-4, gt=0)
    clip_high: float = Field(default=3.5e-4, gt=0)
    kl_coef: float = Field(default=0.01, ge=0)
    entropy_coef: float = Field(default=1e-4, ge=0)
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.0
    max_grad_norm: float = 0.5
    micro_batch_size: int = Field(default=4, ge=1)
    epochs_per_update: int = Field(default=1, ge=1)
    """Passes over a rollout batch; the clip matters from the second optimiser step on."""
    minibatches_per_update: int = Field(default=2, ge=1)
    max_logprob_diff: float = Field(default=0.02, gt=0)
    """Mean |trainer - sampler| log-probability above which an update is an error (float32: about 1e-5)."""
    max_env_attempts: int = Field(default=3, ge=1)
    """Tries of one episode on fresh replicas before a fault is its outcome."""
    episode_timeout_s: float = Field(default=900.0, gt=0)
    turn_timeout_s: float = Field(default=120.0, gt=0)
    top_p: float = Field(default=0.95, gt=0, le=1)


class ReplaySection(Section):
    """Which recorded success joins a group whose every raw reward is under the threshold (spec 01)."""

    threshold: float = Field(default=0.5, gt=0, le=1)
    """Raw task reward from which an episode counts as a success, of a group's and of a row's."""
    per_task: int = Field(default=10, ge=1)
    """Rows kept of each task id: the better source and then the earlier line first, in turn with the newest successes
    where `include_online` is set."""
    weight: float = Field(default=1.0, ge=0)
    """Of an injected sequence in the loss."""
    strategy: Literal["uniform", "newest", "shortest", "recent_failure", "diverse"] = "uniform"
    """How a row is drawn among its task's (formulas in rollout/replay_strategies.py); `recent_failure` decides which
    failed groups are served first."""
    max_injections: int | None = Field(default=None, ge=0)
    """Of an update; None for as many as there are failed groups."""
    include_online: bool = False
    """Whether successes of the phase's earlier updates, and of the stages before it, are rows too."""
    require_verified: bool = False
    """Whether a demonstration counts, for SFT too, only where re-executing it earned the threshold."""
    num_verification_attempts: int = Field(default=2, ge=1)
    """Re-executions of a demonstration before its failure is believed; faults do not count."""
    verify: Literal["none", "sample", "all"] = "sample"
    """Which demonstrations are re-executed: of every task one before any task's second."""
    verification_sample: int = Field(default=16, ge=1)
    """How many `sample` re-executes."""


class GspoPhaseSection(Section):
    num_updates: int = Field(ge=1)
    temperature: float = Field(gt=0)
    seed: int = 0


class GspoSection(GspoSharedSection):
    phase1: GspoPhaseSection
    phase2: GspoPhaseSection


class EvaluationSection(Section):
    seeds: tuple[int, ...] = (0,)
    temperature: float = Field(default=0.0, ge=0)
    max_turns: int = Field(default=12, ge=1)
    confidence: float = Field(default=0.95, gt=0, lt=1)


class Recipe(Section):
    name: str
    suite: SuiteSection = SuiteSection()
    desktop: DesktopSection = DesktopSection()
    model: TinyModelSection | PretrainedModelSection = Field(discriminator="kind")
    agent: AgentSection = AgentSection()
    reward: RewardSection = RewardSection()
    sft: SftSection
    gspo: GspoSection
    replay: ReplaySection = ReplaySection()
    evaluation: EvaluationSection = EvaluationSection()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.agent.max_response_tokens >= self.agent.max_context_tokens:
            raise ValueError("agent.max_response_tokens must be smaller than agent.max_context_tokens")
        if self.gspo.minibatches_per_update > self.gspo.group_size * self.gspo.tasks_per_update:
            raise ValueError("gspo.minibatches_per_update exceeds the episodes of an update")
        if self.replay.require_verified and self.replay.verify != "all":
            raise ValueError('replay.require_verified needs replay.verify = "all"')
        return self


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the package."""
    folder = resources.files("osworld_pipeline.recipes")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_recipe(name_or_path: str) -> Recipe:
    """A shipped recipe by name, or a TOML file by path (anything that ends in .toml).

    Raises:
        RecipeError: no such recipe, not TOML, an unknown key, or a contradiction; names the key.
    """
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        if not path.is_file():
            raise RecipeError(f"no recipe at {path}")
        text = path.read_text()
    else:
        if name_or_path not in recipe_names():
            raise RecipeError(
                f"no recipe named '{name_or_path}'; there are: {', '.join(recipe_names())}, or give a .toml file"
            )
        text = (resources.files("osworld_pipeline.recipes") / f"{name_or_path}.toml").read_text()
    return parse_recipe(text, name=Path(name_or_path).stem)


def parse_recipe(text: str, *, name: str) -> Recipe:
    try:
        data: dict[str, Any] = tomllib.loads(text)
        return Recipe.model_validate({"name": name, **data})
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {name} is not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise RecipeError(f"recipe {name}: {where}: {first['msg']}") from error
