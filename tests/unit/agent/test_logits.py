"""Logits of a 16-bit model are the exact products, not rounded to its dtype, with the gradients of its own layer."""

import pytest
import torch
from torch import nn

from osworld_pipeline.agent.logits import project_logits

NUM, SIZE, VOCAB = 7, 512, 300


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(SIZE, VOCAB, bias=False, dtype=torch.bfloat16)


@pytest.fixture
def hidden_ND() -> torch.Tensor:
    """Large enough that logits reach 20 and more, where bfloat16 has steps of 0.125."""
    torch.manual_seed(1)
    return (20 * torch.randn(NUM, SIZE)).bfloat16()


def test_logits_are_the_products_in_double_precision(layer: nn.Linear, hidden_ND: torch.Tensor) -> None:
    layer.requires_grad_(False)
    exact_NV = hidden_ND.double() @ layer.weight.double().T
    logits_NV = project_logits(layer, hidden_ND)
    assert logits_NV.dtype == torch.float32
    assert float(exact_NV.abs().max()) > 20
    assert float((logits_NV - exact_NV).abs().max()) < 1e-4
    assert float((layer(hidden_ND) - exact_NV).abs().max()) > 0.05, "the layer itself rounds"


def test_gradients_of_logits_equal_those_of_the_layer(layer: nn.Linear, hidden_ND: torch.Tensor) -> None:
    aim_N = torch.arange(NUM)

    def gradients(project: object) -> tuple[torch.Tensor, torch.Tensor]:
        leaf_ND = hidden_ND.clone().requires_grad_()
        layer.weight.grad = None
        logits_NV = project_logits(layer, leaf_ND) if project is project_logits else layer(leaf_ND).float()
        torch.nn.functional.cross_entropy(logits_NV, aim_N).backward()
        assert leaf_ND.grad is not None
        assert layer.weight.grad is not None
        assert leaf_ND.grad.dtype == layer.weight.grad.dtype == torch.bfloat16
        return leaf_ND.grad.float(), layer.weight.grad.float()

    for ours, theirs in zip(gradients(project_logits), gradients(layer), strict=True):
        # The layer's own logits are rounded, so its gradients are, too.
        assert float((ours - theirs).norm() / theirs.norm()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_of_a_wider_dtype_computes_its_own_logits(dtype: torch.dtype, hidden_ND: torch.Tensor) -> None:
    layer = nn.Linear(SIZE, VOCAB, bias=False, dtype=dtype)
    assert torch.equal(project_logits(layer, hidden_ND.to(dtype)), layer(hidden_ND.to(dtype)))


def test_a_layer_with_a_bias_computes_its_own_logits(hidden_ND: torch.Tensor) -> None:
    layer = nn.Linear(SIZE, VOCAB, bias=True, dtype=torch.bfloat16)
    assert torch.equal(project_logits(layer, hidden_ND), layer(hidden_ND))
