import pytest
import torch

from osworld_pipeline.errors import TrainingError
from osworld_pipeline.training.optimizer import MasterAdamW


def make(param: torch.nn.Parameter, *, learning_rate: float = 1e-5, weight_decay: float = 0.0) -> MasterAdamW:
    return MasterAdamW([("weight", param)], learning_rate=learning_rate, betas=(0.9, 0.98), weight_decay=weight_decay)


def step(optimizer: MasterAdamW, param: torch.nn.Parameter, gradient: float) -> float:
    param.grad = torch.full_like(param, gradient)
    optimizer.collect_gradients()
    return optimizer.step(max_grad_norm=10.0)


def test_many_small_steps_move_a_bfloat16_weight():
    param = torch.nn.Parameter(torch.full((2, 2), 0.01, dtype=torch.bfloat16))
    optimizer = make(param)
    for _ in range(50):
        step(optimizer, param, 1.0)
    # 50 steps of 1e-5 against the gradient's sign; a single one is below bfloat16's resolution at 0.01 (3e-5).
    assert float(param.detach()[0, 0]) == pytest.approx(0.0095, abs=4e-5)


def test_float32_weights_have_no_second_copy():
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = make(param, learning_rate=0.1)
    step(optimizer, param, 1.0)
    assert set(optimizer.state_dict()) == {"step/weight", "exp_avg/weight", "exp_avg_sq/weight"}
    assert param.detach().flatten().tolist() == pytest.approx([0.9] * 4, abs=1e-6)


def test_gradients_of_several_backward_passes_add_up_in_float32():
    param = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    optimizer = make(param)
    for gradient in (256.0, 1.0, 1.0):
        # In bfloat16 256 + 1 is 256.
        param.grad = torch.full_like(param, gradient)
        optimizer.collect_gradients()
    assert optimizer.step(max_grad_norm=1e9) == 258.0


def test_the_returned_norm_is_the_one_before_clipping_and_gradients_are_cleared():
    param = torch.nn.Parameter(torch.zeros(1, 2))
    optimizer = make(param)
    param.grad = torch.tensor([[3.0, 4.0]])
    assert optimizer.step(max_grad_norm=1.0) == pytest.approx(5.0)
    assert param.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_leaves_the_weights_unchanged(dtype: torch.dtype):
    param = torch.nn.Parameter(torch.ones(1, 2, dtype=dtype))
    optimizer = make(param, learning_rate=0.1)
    param.grad = torch.tensor([[float("nan"), 1.0]], dtype=dtype)
    optimizer.collect_gradients()
    with pytest.raises(TrainingError, match="the gradient norm is nan"):
        optimizer.step(max_grad_norm=1.0)
    assert param.detach().tolist() == [[1.0, 1.0]]


def test_weight_decay_does_not_apply_to_norms_and_biases():
    matrix, bias = torch.nn.Parameter(torch.ones(1, 1)), torch.nn.Parameter(torch.ones(1))
    named = [("matrix", matrix), ("bias", bias)]
    optimizer = MasterAdamW(named, learning_rate=0.1, betas=(0.9, 0.98), weight_decay=0.5)
    matrix.grad, bias.grad = torch.zeros(1, 1), torch.zeros(1)
    optimizer.step(max_grad_norm=1.0)
    assert matrix.item() == pytest.approx(0.95)
    assert bias.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_continues_like_an_uninterrupted_one(dtype: torch.dtype):
    first = torch.nn.Parameter(torch.full((2, 2), 0.3, dtype=dtype))
    optimizer = make(first, learning_rate=1e-3)
    for gradient in (1.0, -0.5):
        step(optimizer, first, gradient)
    second = torch.nn.Parameter(first.detach().clone())
    restored = make(second, learning_rate=1e-3)
    saved = optimizer.state_dict()
    with torch.no_grad():
        for name, tensor in restored.state_dict().items():
            tensor.copy_(saved[name])
    restored.restored()
    for gradient in (0.2, 0.7, -1.0):
        step(optimizer, first, gradient)
        step(restored, second, gradient)
    assert torch.equal(first, second)
