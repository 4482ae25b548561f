"""The step of the stub, on both sides of a comparison."""

STEP_S = 0.05
SCREENSHOT = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 80
"""20 KB that are not decoded."""
TASK = {"id": "stub", "instruction": "Do nothing.", "config": [], "evaluator": {"func": "infeasible"}}
