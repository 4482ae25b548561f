"""Episodes to store: a plain one by hand, and arbitrary ones by hypothesis."""

from hypothesis import strategies as st

from osworld_pipeline.domain.episode import (
    ContextMode,
    Episode,
    EpisodePurpose,
    Outcome,
    Reward,
    SamplingParams,
    Step,
    StepSignals,
    TokenSequence,
)


def make_step(index: int = 0, *, sha256: str = "a" * 64, **changes) -> Step:
    fields = {
        "step_index": index,
        "screenshot_sha256": sha256,
        "screenshot_width": 512,
        "screenshot_height": 320,
        "screenshot_format": "png",
        "screenshot_num_bytes": 512,
        "observation_text": "Task: rename alpha",
        "response_text": 'Action: type\n<tool_call>{"name":"computer_use"}</tool_call>',
        "action": {"action": "type", "text": "mv alpha bravo\n"},
        "command": 'pyautogui.write("mv alpha bravo\\n")',
        "signals": StepSignals(action_type="type", action_parsed=True, action_executed=True, coordinate=(3, 4)),
        "policy_version": 7,
        "prompt_num_tokens": 300,
        "response_num_tokens": 20,
        "model_s": 0.25,
        "step_s": 0.5,
    }
    return Step(**(fields | changes))


def make_sequence(num_tokens: int = 3, *, num_images: int = 2, **changes) -> TokenSequence:
    """One token of a prompt, then tokens sampled by version 7. The sequence contains the first screenshots."""
    num_sampled = num_tokens - 1
    fields = {
        "token_ids": tuple(range(1, num_tokens + 1)),
        "response_mask": (0, *(1,) * num_sampled),
        "sampled_logprobs": (0.0, *(-0.5 / (index + 1) for index in range(num_sampled))),
        "policy_versions": (-1, *(7,) * num_sampled),
        "image_steps": tuple(range(num_images)),
    }
    return TokenSequence(**(fields | changes))


def make_episode(episode_id: str = "e0", *, num_steps: int = 2, **changes) -> Episode:
    steps = changes.setdefault("steps", tuple(make_step(index) for index in range(num_steps)))
    fields = {
        "episode_id": episode_id,
        "task_id": "desktop-basics-rename_folder-0001",
        "task_digest": "d" * 64,
        "purpose": EpisodePurpose.EVALUATE,
        "checkpoint_id": "sft-000000000001",
        "engine": "transformers",
        "sampling": SamplingParams(temperature=0.8),
        "outcome": Outcome.SUCCESS,
        "reward": Reward(task=1.0, partial=0.5, penalty=0.1, shaped=1.0, parts={"efficiency": 0.5}),
        "sequences": (make_sequence(num_images=len(steps)),),
        "times_s": {"reset": 0.5, "total": 3.0},
        "run_ids": {"dagster": "run-1"},
        "max_turns": 5,
    }
    return Episode(**(fields | changes))


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
FLOATS = st.floats(allow_nan=False)
INT32 = st.integers(-(2**31), 2**31 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
SIGNALS = st.builds(
    StepSignals,
    action_type=TEXT,
    action_parsed=st.booleans(),
    action_executed=st.booleans(),
    action_error=st.none() | TEXT,
    target_element=st.none() | TEXT,
    fallback_used=st.booleans(),
    coordinate=st.none() | st.tuples(INT32, INT32),
    a11y_grounded=st.booleans(),
    screen_diff=FLOATS,
    screen_changed=st.booleans(),
    screen_hash=TEXT,
    a11y_delta=FLOATS,
    a11y_changed=st.booleans(),
    terminal_changed=st.booleans(),
)


@st.composite
def sequences(draw: st.DrawFn) -> TokenSequence:
    token = st.tuples(st.integers(0, 2**31 - 1), st.sampled_from([0, 1]), FLOATS, INT32)
    tokens = draw(st.lists(token, min_size=1, max_size=5))
    token_ids, mask, logprobs, versions = zip(*tokens, strict=True)
    return TokenSequence(
        token_ids=token_ids,
        response_mask=mask,
        sampled_logprobs=logprobs,
        policy_versions=versions,
        image_steps=tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=3))),
    )


@st.composite
def episodes(draw: st.DrawFn, episode_id: str) -> Episode:
    steps = tuple(
        make_step(
            index,
            sha256=draw(TEXT),
            observation_text=draw(TEXT),
            response_text=draw(TEXT),
            action=draw(st.none() | st.dictionaries(TEXT, JSON, max_size=3)),
            command=draw(st.none() | TEXT),
            signals=draw(SIGNALS),
            policy_version=draw(INT32),
            model_s=draw(FLOATS),
        )
        for index in range(draw(st.integers(0, 3)))
    )
    return make_episode(
        episode_id,
        task_id=draw(TEXT),
        purpose=draw(st.sampled_from(EpisodePurpose)),
        outcome=draw(st.sampled_from(Outcome)),
        error=draw(st.none() | TEXT),
        reward=draw(st.none() | st.builds(Reward, task=FLOATS, partial=FLOATS, penalty=FLOATS, shaped=FLOATS)),
        steps=steps,
        context_mode=draw(st.sampled_from(ContextMode)),
        sequences=tuple(draw(st.lists(sequences(), max_size=3))),
        earlier_faults=tuple(draw(st.lists(TEXT, max_size=2))),
        group_id=draw(st.none() | TEXT),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        times_s=draw(st.dictionaries(TEXT, FLOATS, max_size=3)),
        run_ids=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        sampling=SamplingParams(temperature=draw(FLOATS), stop=tuple(draw(st.lists(TEXT, max_size=2)))),
    )
