"""Slime-OSWorld's own environment wrapper over its HTTP client, unchanged, driven as its rollout drives it.

Arguments: the checkout, a task file, a line that solves the task in a terminal. OSWORLD_SERVER_URL names the server."""

import importlib.util
import json
import sys
from pathlib import Path


def load(checkout: Path):
    spec = importlib.util.spec_from_file_location("slime_env", checkout / "slime_osworld" / "env.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def call(name: str, arguments: dict) -> str:
    reported = json.dumps({"name": "computer_use", "arguments": {"action": name, **arguments}})
    return f"Action: {name}.\n<tool_call>\n{reported}\n</tool_call>"


def main(checkout: Path, task_file: Path, line: str) -> None:
    client = load(checkout)
    task = json.loads(task_file.read_text())
    sample = type("Sample", (), {"metadata": {"task_config": task}})()
    replies = (
        call("left_click", {"coordinate": [960, 540]}),
        call("key", {"keys": ["ctrl", "alt", "t"]}),
        call("wait", {}),
        call("type", {"text": line}),
        call("key", {"keys": ["enter"]}),
        call("terminate", {"status": "success"}),
    )
    for solves in (False, True):
        env = client.build_env(sample)
        observation, info = env.reset()
        (image,) = next(iter(observation["multi_modal_data"].values()))
        num_chars = len(observation["obs_str"])
        print(f"reset: task {info['task_id']}, screenshot {image.size}, text of {num_chars} characters")
        for reply in replies if solves else replies[-1:]:
            observation, done, info = env.step(reply)
            signal = info["step_signal"]
            reported = {
                key: signal[key] for key in ("action_type", "action_executed", "action_error", "screen_changed")
            }
            print(f"step {signal['step']}: {reported}, done {done}")
        reported = client.finalize_episode(env, observation, sample, list(replies))["osworld"]
        print(f"finalize_episode: turns {reported['turns']}, task_reward {reported['task_reward']}")
        env.close()
        assert reported["task_reward"] == float(solves), reported["task_reward"]
    print("slime: ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
