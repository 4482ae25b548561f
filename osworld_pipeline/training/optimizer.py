"""AdamW whose own weights are float32 whatever the model's are.

In bfloat16 a weight near 0.01 moves in steps of about 4e-5; a learning rate of 5e-7 would round to nothing. So each
low-precision parameter has a float32 master that collects gradients and takes the step; the model gets a copy.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from osworld_pipeline.errors import TrainingError


class MasterAdamW:
    """Weight decay applies to matrices only, not to norms and biases."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        self._params = [param for param in parameters if param.requires_grad]
        self._masters: list[torch.Tensor] = [
            param if param.dtype == torch.float32 else param.detach().float() for param in self._params
        ]
        matrices = [master for master in self._masters if master.ndim > 1]
        others = [master for master in self._masters if master.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate

    def collect_gradients(self) -> None:
        """Adds what a backward pass left in the model to the masters; call it after each one."""
        for param, master in zip(self._params, self._masters, strict=True):
            if master is param or param.grad is None:
                continue
            master.grad = param.grad.float() if master.grad is None else master.grad.add_(param.grad)
            param.grad = None

    def step(self, *, max_grad_norm: float) -> float:
        """Clips, steps, clears; returns the norm before clipping.

        Raises:
            TrainingError: a gradient is not finite; the weights are as they were.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, max_grad_norm))
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient norm is {norm}: the weights are left as they were, lower the learning rate"
            )
        self._adamw.step()
        self.zero_grad()
        with torch.no_grad():
            for param, master in zip(self._params, self._masters, strict=True):
                if master is not param:
                    param.copy_(master)
        return norm

    def zero_grad(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            param.grad = master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Masters are in it where they are more than the model's weights."""
        masters = [
            None if master is param else master for param, master in zip(self._params, self._masters, strict=True)
        ]
        return {"adamw": self._adamw.state_dict(), "masters": masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state["adamw"])
        with torch.no_grad():
            for param, master, saved in zip(self._params, self._masters, state["masters"], strict=True):
                if saved is not None:
                    master.copy_(saved)
                    param.copy_(master)
