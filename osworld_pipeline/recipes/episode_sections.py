"""The sections that say how episodes run: tasks, desktops, what the model sees, what samples it, what it earns. The
docstring under a key is its documentation."""

from typing import Literal

from pydantic import Field

from osworld_pipeline.domain.observation import Settle
from osworld_pipeline.recipes.section import Section


class SuiteSection(Section):
    """The built-in task suite: families x instances, split by instance."""

    name: Literal["desktop_basics", "desktop_shortcuts", "windows_basics", "wine_basics"] = "desktop_basics"
    """Which suite: of the desktop's own programs; of these, with shortcuts that imitation learns and reinforcement
    unlearns (docs/decisions/0026); of Windows programs on Windows desktops; or of Windows programs on local desktops,
    where Debian's Wine runs them."""
    seed: int = 0
    """Of the instances: another seed, other names and places."""
    families: tuple[str, ...] = ()
    """Empty: all of them."""
    num_train: int = Field(default=12, ge=1)
    """Training instances of each family."""
    num_heldout: int = Field(default=3, ge=1)
    """Instances of each family that are never trained on."""


class DesktopSection(Section):
    """Where desktops are, how many, and how they look."""

    server_urls: tuple[str, ...] = ()
    """Base URLs of env servers, used in turn; empty starts one here, with local desktops."""
    num_replicas: int = Field(default=2, ge=1)
    """Desktops used at a time, of all servers together."""
    screen_width: int = Field(default=1920, ge=64)
    """Of a desktop, in pixels."""
    screen_height: int = Field(default=1080, ge=64)
    """Of a desktop, in pixels."""
    pause_s: float = Field(default=0.5, ge=0)
    """Seconds to let the screen settle after an action."""
    settle: Settle = "fixed"
    """`fixed`: each action is followed by the whole of `pause_s`, as in OSWorld. `adaptive`: the screen is observed as
    soon as it has settled, at the latest after `pause_s`."""
    require_a11y_tree: bool = True
    """Whether the accessibility tree is asked for, shown to the model, and used in the reward."""
    require_terminal: bool = False
    """Whether the text of the terminal is asked for and shown to the model."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Of one request to an env server; None for as long as a turn may take (gspo.turn_timeout_s)."""


class AgentSection(Section):
    """What the model sees and says."""

    dialect: Literal["slime", "pyautogui", "sendkey", "calls"] = "slime"
    """How actions are written: Slime-OSWorld's tool calls, AReaL's fenced pyautogui, the Windows example's key tags, or
    OSGym's calls."""
    coordinate_space: Literal["dialect", "model_pixels", "unit", "thousand"] = "dialect"
    """What a coordinate counts: pixels of the image the model saw, 0..1 or 0..1000 of its sides; `dialect` is the
    dialect's own."""
    context_mode: Literal["append", "window"] = "append"
    """`append`: the whole episode is one sequence; `window`: each turn is one, with the last screenshots only."""
    window_screenshots: int = Field(default=3, ge=1)
    """Screenshots in a window, the newest included; of older turns the actions remain as text."""
    show_screenshots: bool = True
    """False for the text-only ablation: the model reads that a screenshot was left out."""
    max_turns: int = Field(default=8, ge=1)
    """Step budget of a training episode."""
    max_response_tokens: int = Field(default=400, ge=8)
    """Limit of one response."""
    max_context_tokens: int = Field(default=8192, ge=128)
    """Limit of a sequence, its last response included."""
    max_pixels: int = Field(default=1_003_520, ge=1024)
    """Screenshots are shrunk to at most this many pixels, sides divisible by 32."""
    a11y_max_length: int = Field(default=4096, ge=0)
    """Characters of the accessibility tree that the model reads."""
    system_prompt: Literal["full", "short"] = "full"
    """`short` spares a tiny model the manual; its action grammar is the same."""


class LaunchSection(Section):
    """sglang servers that a program starts on its own machine, keeps up, and stops at its end. SGLANG_ENV names the
    environment that has sglang."""

    num_servers: int = Field(default=1, ge=1)
    """Servers, each with all weights."""
    device: Literal["cuda", "cpu"] = "cuda"
    """`cpu`: by scripts/sglang-cpu."""
    gpus_per_server: int = Field(default=1, ge=1)
    """GPUs that one server splits the weights over (tensor parallelism)."""
    first_gpu: int | None = Field(default=None, ge=0)
    """GPU of the first server, counted among the visible ones; None for the one after the trainer's
    (trainer.num_processes)."""
    arguments: tuple[str, ...] = ()
    """Added to sglang's command line."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """How long a server may load its model."""


class EngineSection(Section):
    """What samples the policy."""

    kind: Literal["transformers", "sglang", "openai"] = "transformers"
    """`transformers`: in the program's own process; `sglang`: servers at `urls`; `openai`: an OpenAI-compatible
    endpoint, which gives no log-probabilities and so only evaluates."""
    urls: tuple[str, ...] = ()
    """Base URLs: sglang servers (or one router), or one OpenAI-compatible endpoint ending in /v1."""
    launch: LaunchSection | None = None
    """Absent: sglang servers are found at `urls`."""
    model: str = ""
    """The model's name at an OpenAI-compatible endpoint."""
    max_batch: int = Field(default=16, ge=1)
    """Requests that the transformers engine answers together."""
    reuse_kv_cache: bool = True
    """Whether the transformers engine keeps an episode's keys and values between turns in `append` mode."""
    request_timeout_s: float = Field(default=120.0, gt=0)
    """Of one request to a server."""
    retry_budget_s: float = Field(default=300.0, ge=0)
    """How long one turn's requests may be tried again after 429, 5xx or a timeout; then it is a policy_fault."""
    health_timeout_s: float = Field(default=120.0, gt=0)
    """How long servers may take to answer at the start."""
    parity_probe: bool = True
    """Whether an engine's log-probabilities are compared with the checkpoint's on a few fixed conversations before the
    first episode, and those of an sglang server that joins later before its first response is used. `openai` has none
    to compare."""


class RewardSection(Section):
    """Spec 01, "Step signals and reward"."""

    shaping: Literal["slime", "bounded", "none"] = "slime"
    """`slime`: clamp(task + alpha * partial - penalties, 0, 1). `bounded`: the process score counts only below
    `success_threshold` and never reaches it, so no failure earns what a success does. `none`: the grader's score."""
    success_threshold: float = Field(default=0.5, gt=0, le=1)
    """Raw task reward from which an episode is a success."""
    partial_tasks: bool = False
    """Whether a raw reward between 0 and the threshold (a grader's partial credit) is kept in the shaped one."""
    alpha: float = Field(default=0.3, ge=0)
    """Weight of the process score."""
    action_parse_valid: float = 0.10
    """Weight of the share of steps whose action was understood."""
    action_executed: float = 0.15
    """Weight of the share of steps whose action the desktop carried out."""
    a11y_grounding: float = 0.30
    """Weight of the share of steps whose target the accessibility tree named; 0 without a tree."""
    tool_calling: float = 0.25
    """Weight of 0.4 diversity + 0.4 complexity + 0.2 modality of the actions."""
    efficiency: float = 0.05
    """Weight of the share of the step budget left over."""
    screen_change: float = 0.05
    """Weight of the share of steps that changed the screen."""
    a11y_change: float = 0.05
    """Weight of the share of steps that changed the accessibility tree; 0 without a tree."""
    terminal_change: float = 0.05
    """Weight of the share of steps that changed the terminal."""
    screen_diff_threshold: float = 0.005
    """Mean difference of two 64x64 greyscale screens, 0..1, from which a screen counts as changed."""
    complexity: Literal["low", "medium", "high"] = "low"
    """Expected number of steps: 2-5, 5-12 or 10-25."""


class RolloutSection(Section):
    """How episodes are collected for an update."""

    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """`synchronous`: sampled by exactly the weights that the update trains, repeatable to the bit.
    `asynchronous`: rollouts go on while the trainer updates."""
    max_staleness: int = Field(default=2, ge=0)
    """Updates that may lie between the weights that sampled a token and those it trains, in asynchronous mode."""
    max_concurrent_episodes: int | None = Field(default=None, ge=1)
    """Episodes in flight; None for as many as there are replicas."""
    signal: Literal["task", "shaped"] = "task"
    """Which rewards of a group must differ for it to be trained on: raw task rewards (`task`: a group that failed or
    succeeded as a whole is not, however its shaped rewards differ) or shaped ones. Advantages are over shaped rewards
    either way."""
    zero_variance: Literal["skip", "top_up"] = "skip"
    """What becomes of a group without a signal, whose fate is `zero_variance`: nothing, or another task's group in its
    place (dynamic sampling)."""
    max_top_ups: int = Field(default=4, ge=0)
    """Groups that may be run in an update's place of others."""
    min_valid_episodes: int = Field(default=2, ge=2)
    """Of a group; one with fewer is resampled."""
    max_resamples: int = Field(default=1, ge=0)
    """Times that a group's faulty episodes are run again, under ids of their own, before it is dropped."""
    max_fault_share: float = Field(default=0.5, ge=0, le=1)
    """Share of an update's episodes that may end in faults: timeouts included, resampled members counted each. Beyond
    it the update is held: no optimiser step, and its groups are run again after a pause. 1 turns this off."""
    max_held_updates: int = Field(default=3, ge=1)
    """Tries of one update held in a row with which training stops, with an error that names the commonest fault."""
    held_pause_s: float = Field(default=60.0, ge=0)
    """Before a held update is tried again the first time; twice as long before each further try, at most ten minutes,
    and up to half as much again by chance."""
    tasks: Literal["all", "left_by_sft"] = "all"
    """Which training tasks episodes are run of. `left_by_sft`: those whose demonstrations SFT did not take
    (`sft.task_share`), of which the policy can have memorised nothing."""
    task_sampling: Literal["round_robin", "curriculum"] = "round_robin"
    """`round_robin`: every task once before any comes again, the domains spread evenly. `curriculum`: tasks whose
    recent success is near `curriculum_target` come more often."""
    curriculum_target: float = Field(default=0.5, gt=0, lt=1)
    """Success rate that teaches most."""
    curriculum_floor: float = Field(default=0.1, gt=0, le=1)
    """Least relative chance of any task, so that none is forgotten."""
    reported_rewards: int = Field(default=5, ge=0)
    """Episodes of an update whose reward is told with all its parts, in the log of the run."""


class EvaluationSection(Section):
    """How checkpoints are scored on the held-out tasks."""

    seeds: tuple[int, ...] = (0,)
    """One episode of each task for each."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    max_turns: int = Field(default=12, ge=1)
    """Step budget of an episode."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Of the intervals."""
    suites: tuple[str, ...] = ("heldout",)
    """Which new checkpoints are evaluated on by themselves: `heldout`, OSWorld's lists, or files of your own
    (docs/evaluation.md)."""
