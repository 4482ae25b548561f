"""AdamW with float32 master weights for models of any precision.

In bfloat16 a weight near 0.01 has a resolution of about 6e-5; steps with a learning rate of 5e-7 would be rounded away.
So each low-precision parameter has a float32 master that accumulates gradients and takes the step, and the model gets a
copy. If the model is sharded, so are masters and moments.
"""

import math
from collections.abc import Iterable

import torch

from osworld_pipeline.errors import TrainingError
from osworld_pipeline.training.distributed.sharding import whole


class MasterAdamW:
    """Weight decay applies to matrices only, not to norms and biases."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        """`parameters` by name; those without gradients are omitted."""
        named = [(name, param) for name, param in parameters if param.requires_grad]
        self._names = [name for name, _ in named]
        self._params = [param for _, param in named]
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
        """Adds the gradients of a backward pass to the masters; call it after each one."""
        for param, master in zip(self._params, self._masters, strict=True):
            if master is param or param.grad is None:
                continue
            master.grad = param.grad.float() if master.grad is None else master.grad.add_(param.grad)
            param.grad = None

    def step(self, *, max_grad_norm: float) -> float:
        """Clips, steps, clears; returns the norm before clipping, over all shards.

        Raises:
            TrainingError: a gradient is not finite; the weights are unchanged.
        """
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self._masters, max_grad_norm)))
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient norm is {norm}: this step was not made, lower the learning rate")
        self._adamw.step()
        self.zero_grad()
        self._copy_masters()
        return norm

    def zero_grad(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            param.grad = master.grad = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors in use (not copies), by kind and parameter: moments, step counts, and masters if they are
        separate from the model's weights. Read a saved state into them, then call `restored`."""
        state: dict[str, torch.Tensor] = {}
        for name, param, master in zip(self._names, self._params, self._masters, strict=True):
            held = self._adamw.state[master]
            if not held:
                held["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                held["exp_avg"] = torch.zeros_like(master, requires_grad=False)
                held["exp_avg_sq"] = torch.zeros_like(master, requires_grad=False)
            state |= {f"{kind}/{name}": tensor for kind, tensor in held.items()}
            if master is not param:
                state[f"master/{name}"] = master
        return state

    def restored(self) -> None:
        """Copies the masters to the model's weights."""
        self._copy_masters()

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            if master is not param:
                param.copy_(master)
