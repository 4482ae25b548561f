"""FSDP2: the weights are sharded across all ranks and gathered layer by layer during a pass."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from osworld_pipeline.errors import TrainingError
from osworld_pipeline.training.distributed.process_group import ProcessGroup


def shard_model(model: Any, process_group: ProcessGroup, *, forward_method: str, cpu_offload: bool = False) -> None:
    """Shards a model in place, layer by layer; a single process keeps it whole. `forward_method`: the model's method
    that runs a pass.

    Gradients are summed over the ranks in float32, so each rank's loss must be its share of the total.

    Raises:
        TrainingError: `cpu_offload` without ranks to shard over.
    """
    if process_group.is_alone:
        if cpu_offload:
            raise TrainingError(
                "trainer.cpu_offload needs weights that are sharded over ranks: set trainer.num_processes to 2 or more"
            )
        return
    is_cuda = process_group.device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": init_device_mesh(process_group.device.type, (process_group.world_size,)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        # Without an accelerator, weights are in host memory anyway.
        "offload_policy": CPUOffloadPolicy() if cpu_offload and is_cuda else OffloadPolicy(),
    }
    for layer in [*model.model.visual.blocks, *model.model.language_model.layers]:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale during a reduction
    register_fsdp_forward_method(model, forward_method)


def gather_weights(model: Any) -> dict[str, torch.Tensor]:
    """All weights unsharded, by name: on rank 0, in host memory; empty on other ranks. A model that was never sharded
    returns its own tensors."""
    if not isinstance(model, FSDPModule):
        return model.state_dict()
    whole_model: Any = model
    gathered: Any = get_model_state_dict(whole_model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # Tied weights have both their names here; a whole model's save writes them once.
    names = {name for name, _ in whole_model.named_parameters()} | {name for name, _ in whole_model.named_buffers()}
    return {name: tensor for name, tensor in gathered.items() if name in names}


def gather_trained(model: Any, process_group: ProcessGroup) -> dict[str, torch.Tensor]:
    """Does the same as `gather_weights`, for the trained parameters only."""
    trained = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
    if process_group.is_alone:
        return trained
    gathered: dict[str, torch.Tensor] = {}
    for name, tensor in trained.items():
        whole_tensor = whole(_on_mesh(tensor))
        if process_group.is_main:
            gathered[name] = whole_tensor.cpu()
    return gathered


def each_weight(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights by their names in a checkpoint, gathered one after the other. Every rank must exhaust this; it holds
    one tensor in memory. Tensors of an unsharded model are its own."""
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    for name, tensor in model.state_dict().items():
        if name in names:  # tied weights once
            yield name, whole(_on_mesh(tensor.detach()))


def _on_mesh(tensor: torch.Tensor) -> torch.Tensor:
    """Offloaded shards are in host memory, but the ranks exchange them on their devices."""
    return tensor.to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor


def host_copies(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Independent copies of the tensors in host memory, with the same sharding. Every rank must call this."""
    return {name: _host_copy(tensor) for name, tensor in state.items()}


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    local = tensor.to_local().detach().to("cpu", copy=True)
    mesh = _host_mesh(tensor.device_mesh)
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@cache
def _host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks on their CPUs."""
    return mesh if mesh.device_type == "cpu" else DeviceMesh("cpu", mesh.mesh)


def host_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Snapshot of the result of `gather_weights` in host memory. Weights that are trained or not in host memory are
    copied, tied ones once; weights gathered from shards are copies already."""
    if isinstance(model, FSDPModule):
        return dict(weights)
    changing = {param.untyped_storage().data_ptr() for param in model.parameters() if param.requires_grad}
    copies: dict[int, torch.Tensor] = {}
    fixed: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        if tensor.device.type != "cpu" or place in changing:
            if place not in copies or copies[place].shape != tensor.shape:
                copies[place] = tensor.detach().to("cpu", copy=True)
            fixed[name] = copies[place]
        else:
            fixed[name] = tensor
    return fixed


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers a tensor from the shards of all ranks; every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
