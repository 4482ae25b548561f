"""The sections for episodes: tasks, desktops, the agent, the engine and the reward. The docstring under a key is its
documentation."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from osworld_pipeline.dialects import DialectName
from osworld_pipeline.domain.observation import Settle
from osworld_pipeline.recipes.engine_names import TRANSFORMERS, EngineName
from osworld_pipeline.recipes.section import IN_TINY_TOKENIZER, NOT_LEARNED, Section


class SuiteSection(Section):
    """The built-in task suite: families x instances, split by instance."""

    name: Annotated[
        Literal["desktop_basics", "desktop_shortcuts", "windows_basics", "wine_basics"], IN_TINY_TOKENIZER
    ] = "desktop_basics"
    """The suite: tasks with the desktop's own programs; the same with shortcuts that imitation learns and reinforcement
    unlearns (docs/decisions/0026); tasks with Windows programs on Windows desktops; or tasks with Windows programs on
    local desktops, run by Debian's Wine."""
    seed: Annotated[int, IN_TINY_TOKENIZER] = 0
    """Seed of the instances: it changes their names and positions."""
    families: Annotated[tuple[str, ...], IN_TINY_TOKENIZER] = ()
    """Families of tasks; empty: all."""
    num_train: Annotated[int, IN_TINY_TOKENIZER] = Field(default=12, ge=1)
    """Training instances of each family."""
    num_heldout: int = Field(default=3, ge=1)
    """Instances of each family that are held out from training."""


class DesktopSection(Section):
    """Location, number and appearance of the desktops."""

    server_urls: Annotated[tuple[str, ...], NOT_LEARNED] = ()
    """Base URLs of env servers; an episode goes to the one with the most free desktops. `dns+http://NAME:PORT` stands
    for every address of that name, also of servers that come later. Empty: start one here, with local desktops."""
    may_mix_servers: Annotated[bool, NOT_LEARNED] = False
    """Whether servers may differ in desktop image or grader. An evaluation on such servers has no rank."""
    num_replicas: Annotated[int, NOT_LEARNED] = Field(default=2, ge=1)
    """Desktops used at a time, over all servers."""
    screen_width: Annotated[int, IN_TINY_TOKENIZER] = Field(default=1920, ge=64)
    """Screen width of a desktop, in pixels."""
    screen_height: Annotated[int, IN_TINY_TOKENIZER] = Field(default=1080, ge=64)
    """Screen height of a desktop, in pixels."""
    pause_s: float = Field(default=0.5, ge=0)
    """Seconds to let the screen settle after an action."""
    settle: Settle = "fixed"
    """`fixed`: each action is followed by a pause of `pause_s`, as in OSWorld. `adaptive`: the screen is observed as
    soon as it has settled, at the latest after `pause_s`."""
    require_a11y_tree: bool = True
    """Whether the accessibility tree is requested, shown to the model, and used in the reward."""
    require_terminal: bool = False
    """Whether the text of the terminal is requested and shown to the model."""
    request_timeout_s: Annotated[float | None, NOT_LEARNED] = Field(default=None, gt=0)
    """Timeout of one request to an env server; None: that of a turn (gspo.turn_timeout_s)."""


class AgentSection(Section):
    """Input and output of the model."""

    dialect: Annotated[DialectName, IN_TINY_TOKENIZER] = "slime"
    """Format of the actions: Slime-OSWorld's tool calls, AReaL's fenced pyautogui, the Windows example's key tags, or
    OSGym's calls."""
    coordinate_space: Annotated[Literal["dialect", "model_pixels", "unit", "thousand"], IN_TINY_TOKENIZER] = "dialect"
    """Unit of coordinates: pixels of the image that the model saw, 0..1 or 0..1000 of its sides; `dialect`: the unit of
    the dialect."""
    context_mode: Literal["append", "window"] = "append"
    """`append`: the whole episode is one sequence; `window`: each turn is one, with the last screenshots only."""
    window_screenshots: int = Field(default=3, ge=1)
    """Maximum number of screenshots in a window, including the newest; older turns keep their actions as text."""
    show_screenshots: bool = True
    """False for the text-only ablation: the prompt says that a screenshot was left out."""
    max_turns: int = Field(default=8, ge=1)
    """Step budget of a training episode."""
    max_response_tokens: int = Field(default=400, ge=8)
    """Limit of one response."""
    max_context_tokens: int = Field(default=8192, ge=128)
    """Limit of a sequence, including its last response."""
    max_pixels: int = Field(default=1_003_520, ge=1024)
    """Screenshots are scaled down to at most this many pixels, with sides divisible by 32."""
    a11y_max_length: int = Field(default=4096, ge=0)
    """Characters of the accessibility tree that the model reads."""
    system_prompt: Annotated[Literal["full", "short"], IN_TINY_TOKENIZER] = "full"
    """`short` omits the manual, for a tiny model; the action grammar is the same."""


class LaunchSection(Section):
    """sglang servers that a program starts on its own machine, restarts if they fail, and stops at its end. SGLANG_ENV
    names the environment that has sglang."""

    num_servers: int = Field(default=1, ge=1)
    """Number of servers, each with all weights."""
    device: Literal["cuda", "cpu"] = "cuda"
    """`cpu`: sglang's own server, adapted for a CPU (`setup sglang`)."""
    gpus_per_server: int = Field(default=1, ge=1)
    """GPUs per server for tensor parallelism."""
    first_gpu: int | None = Field(default=None, ge=0)
    """GPU of the first server, as an index of the visible ones; None: the one after the trainer's
    (trainer.num_processes)."""
    arguments: tuple[str, ...] = ()
    """Added to sglang's command line."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Time for a server to load its model."""


class EngineSection(Section):
    """The engine that samples the policy."""

    kind: EngineName = TRANSFORMERS
    """`transformers`: in the program's own process; `sglang`: servers at `urls`, or those of `launch`; `openai`: an
    OpenAI-compatible endpoint, which returns no log-probabilities and is only for evaluation; or an engine of another
    distribution."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of an engine of another distribution, which checks them."""
    urls: tuple[str, ...] = ()
    """Base URLs: sglang servers (or one router), or one OpenAI-compatible endpoint ending in /v1."""
    launch: LaunchSection | None = None
    """Servers to launch; absent: sglang servers are at `urls`."""
    weights: Literal["folder", "broadcast", "upload"] = "folder"
    """How sglang servers receive weights. `folder`: they read a folder under the same path as this program.
    `broadcast`: this program sends them through a process group, NCCL between GPUs and gloo otherwise; no shared
    folder is needed, and the trainer's weights are gathered tensor by tensor. `upload`: this program copies a folder
    to each server's machine, where `osworld-pipeline receive-weights` stores it. Adapters need `folder` or
    `upload`."""
    receiver_port: int = Field(default=30900, ge=1, le=65535)
    """Port of the receiver of `upload`, at the host name of each server."""
    weights_address: str = ""
    """This host's address for the servers of `broadcast`; empty: the one on the route to them."""
    update_servers: Literal["together", "rolling"] = "together"
    """Whether all sglang servers receive new weights at the same time, or one after the other while the rest
    sample."""
    running_responses: Literal["keep", "abort", "wait"] = "keep"
    """What happens to half-done responses when an sglang server receives new weights. `keep`: they keep their tokens
    and continue with the new weights, each token with its policy version; `abort`: they are sampled again; `wait`: the
    update waits for those of this program, at most `request_timeout_s`, while its new requests wait for the update."""
    model: str = ""
    """The model's name at an OpenAI-compatible endpoint."""
    max_batch: int = Field(default=16, ge=1)
    """Batch size of the transformers engine."""
    reuse_kv_cache: bool = True
    """Whether the transformers engine keeps an episode's keys and values between turns in `append` mode."""
    request_timeout_s: float = Field(default=120.0, gt=0)
    """Timeout of one request to a server."""
    retry_budget_s: float = Field(default=300.0, ge=0)
    """Time during which one turn's requests are retried after 429, 5xx, a timeout or a broken connection; after that
    the episode ends as a policy_fault."""
    health_timeout_s: float = Field(default=120.0, gt=0)
    """Time for servers to respond at the start."""
    parity_probe: bool = True
    """Whether an engine's log-probabilities are compared with the checkpoint's on a few fixed conversations before the
    first episode, and those of an sglang server that joins later before its first response is used. `openai` has no
    log-probabilities."""


class RewardSection(Section):
    """The shaped reward, by Slime-OSWorld's step signals."""

    shaping: Literal["slime", "bounded", "none"] = "slime"
    """`slime`: clamp(task + alpha * partial - penalties, 0, 1). `bounded`: the process score counts only below
    `success_threshold` and stays below it, so no failure scores as much as a success. `none`: the grader's score."""
    success_threshold: float = Field(default=0.5, gt=0, le=1)
    """Minimum raw task reward of a success."""
    partial_tasks: bool = False
    """Only for `bounded`: whether a raw reward between 0 and the threshold (partial credit of a grader) is kept in the
    shaped reward. `slime` and `none` always keep it."""
    alpha: float = Field(default=0.3, ge=0)
    """Weight of the process score."""
    action_parse_valid: float = 0.10
    """Weight of the share of steps whose action was parsed."""
    action_executed: float = 0.15
    """Weight of the share of steps whose action the desktop executed."""
    a11y_grounding: float = 0.30
    """Weight of the share of steps whose target is in the accessibility tree; 0 without a tree."""
    tool_calling: float = 0.25
    """Weight of 0.4 diversity + 0.4 complexity + 0.2 modality of the actions."""
    efficiency: float = 0.05
    """Weight of the unused share of the step budget."""
    screen_change: float = 0.05
    """Weight of the share of steps that changed the screen."""
    a11y_change: float = 0.05
    """Weight of the share of steps that changed the accessibility tree; 0 without a tree."""
    terminal_change: float = 0.05
    """Weight of the share of steps that changed the terminal."""
    screen_diff_threshold: float = 0.005
    """Minimum mean difference of two 64x64 greyscale screens, 0..1, for a screen to count as changed."""
    complexity: Literal["low", "medium", "high"] = "low"
    """Expected number of steps: 2-5, 5-12 or 10-25."""


class RolloutSection(Section):
    """Collection of the episodes for an update."""

    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """`synchronous`: sampled by exactly the weights that the update trains, bitwise reproducible. `asynchronous`:
    rollouts continue while the trainer updates."""
    max_staleness: int = Field(default=2, ge=0)
    """Maximum number of updates between the weights that sampled a token and those that it trains, in asynchronous
    mode."""
    max_concurrent_episodes: Annotated[int | None, NOT_LEARNED] = Field(default=None, ge=1)
    """Episodes in flight; None: the number of replicas."""
    signal: Literal["task", "shaped"] = "task"
    """The rewards of a group that must differ for it to be trained on: raw task rewards (`task`: a group of only
    failures or only successes is not trained, even if its shaped rewards differ) or shaped ones. In both cases
    advantages are computed from shaped rewards."""
    zero_variance: Literal["skip", "top_up"] = "skip"
    """Handling of a group that is not trained on, because it has no signal (its status is `zero_variance`) or too few
    valid episodes: drop it, or run another task's group in its place (dynamic sampling)."""
    max_top_ups: int = Field(default=4, ge=0)
    """Maximum number of replacement groups per update."""
    min_valid_episodes: int = Field(default=2, ge=2)
    """Minimum number of valid episodes of a group; one with fewer is resampled."""
    max_resamples: int = Field(default=1, ge=0)
    """Number of times that a group's faulty episodes are run again, with new ids, before it is dropped."""
    max_fault_share: float = Field(default=0.5, ge=0, le=1)
    """Maximum share of an update's episodes that end in faults, including timeouts and each resampled member. Above it
    the update is held: no optimiser step is made, and after a pause all its groups are run again, in an asynchronous
    phase only the groups whose own share of faults is above it. 1 turns this off."""
    max_held_updates: Annotated[int, NOT_LEARNED] = Field(default=3, ge=1)
    """Number of consecutive held tries of one update after which training stops, with an error that names the most
    common fault."""
    held_pause_s: Annotated[float, NOT_LEARNED] = Field(default=60.0, ge=0)
    """Pause before the first retry of a held update; doubled for each further retry, at most ten minutes, plus a random
    part of up to half."""
    tasks: Literal["all", "left_by_sft"] = "all"
    """Training tasks for rollouts. `left_by_sft`: those whose demonstrations SFT did not use (`sft.task_share`), so
    that the policy cannot have memorised them."""
    task_sampling: Literal["round_robin", "curriculum"] = "round_robin"
    """`round_robin`: every task once before any is repeated, with the domains spread evenly. `curriculum`: tasks whose
    recent success is near `curriculum_target` are chosen more often."""
    curriculum_target: float = Field(default=0.5, gt=0, lt=1)
    """Success rate at which a task is chosen most often."""
    curriculum_floor: float = Field(default=0.1, gt=0, le=1)
    """Minimum relative probability of any task, so that all are used."""
    reported_rewards: Annotated[int, NOT_LEARNED] = Field(default=5, ge=0)
    """Episodes of an update whose reward is logged with all its parts, in the log of the run."""


class EvaluationSection(Section):
    """Evaluation of checkpoints on the held-out tasks."""

    seeds: tuple[int, ...] = (0,)
    """Seeds; one episode of each task per seed."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    max_turns: int = Field(default=12, ge=1)
    """Step budget of an episode."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Confidence level of the intervals."""
    suites: Annotated[tuple[str, ...], NOT_LEARNED] = ("heldout",)
    """Suites on which new checkpoints are evaluated automatically: `heldout`, OSWorld's lists, or your own files
    (docs/evaluation.md)."""
