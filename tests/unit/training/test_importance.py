"""Importance weights: by hand, and equal to TRL's and slime's own code on random tensors."""

import ast
import importlib.util
import inspect
import math
import os
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from osworld_pipeline.domain.python_text import parse_python
from osworld_pipeline.training.objective.importance import effective_share, importance_weights

FORMS_OF_TRL = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
TOKEN_FORMS = ("token_truncate", "token_mask")
LOW, HIGH = 0.7, 1.4


def weights(log_ratios: list[list[float]], form: str, *, low: float = LOW, high: float = HIGH):
    """A list of token weights for each episode, and the result with the figures."""
    flat = torch.tensor([value for row in log_ratios for value in row], dtype=torch.float64)
    episodes = torch.tensor([index for index, row in enumerate(log_ratios) for _ in row])
    result = importance_weights(flat, episodes, form=form, low=low, high=high)
    return [part.tolist() for part in result.weights_N.split([len(row) for row in log_ratios])], result


# Two episodes: ratios 2 and 0.5 (product 1, geometric mean 1), and 1.25 alone.
RATIOS = [[math.log(2), math.log(0.5)], [math.log(1.25)]]


@pytest.mark.parametrize(
    ("form", "expected", "changed"),
    [
        ("none", [[1.0, 1.0], [1.0]], 0.0),
        ("token_truncate", [[1.4, 0.5], [1.25]], 1 / 3),
        ("token_mask", [[0.0, 0.0], [1.25]], 2 / 3),
        ("sequence_truncate", [[1.0, 1.0], [1.25]], 0.0),
        ("sequence_mask", [[1.0, 1.0], [1.25]], 0.0),
        ("sequence_reject", [[1.0, 1.0], [1.0]], 0.0),
    ],
)
def test_each_form_of_weights_matches_hand_worked_numbers(form: str, expected: list[list[float]], changed: float):
    found, result = weights(RATIOS, form)
    assert [value for row in found for value in row] == pytest.approx([value for row in expected for value in row])
    assert result.changed_share == pytest.approx(changed)


def test_a_sequence_s_weight_is_the_product_of_its_tokens_ratios_and_not_their_mean():
    # 100 tokens at 0.95: the product is 0.0059; their geometric mean would hide it behind any cap.
    (found,), _ = weights([[math.log(0.95)] * 100], "sequence_truncate")
    assert found == pytest.approx([0.95**100] * 100)
    assert found[0] < 0.006


def test_the_geometric_mean_rejects_a_whole_sequence():
    found, result = weights([[math.log(1.5)] * 3, [0.0] * 2], "sequence_reject")
    assert found == [[0.0] * 3, [1.0] * 2]
    assert result.effective_share == pytest.approx(0.5)


def test_the_effective_share_matches_hand_worked_numbers():
    assert effective_share(torch.tensor([1.0, 1.0, 1.0, 1.0])) == pytest.approx(1.0)
    assert effective_share(torch.tensor([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    # (3 + 1)^2 / (2 * (9 + 1)).
    assert effective_share(torch.tensor([3.0, 1.0])) == pytest.approx(0.8)
    assert effective_share(torch.zeros(3)) == 0.0


@pytest.mark.parametrize(
    "form", ["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_reject"]
)
def test_on_policy_every_weight_is_one_and_the_whole_batch_counts(form: str):
    found, result = weights([[0.0] * 3, [0.0] * 5], form)
    assert {value for row in found for value in row} == {1.0}
    assert (result.effective_share, result.changed_share) == (1.0, 0.0)


@pytest.mark.parametrize("form", ["token_truncate", "sequence_truncate"])
def test_the_effective_share_falls_as_a_policy_drifts(form: str):
    # With log ratios of spread s the share is about exp(-s^2) for tokens and exp(-n s^2) for sequences of n tokens.
    noise = torch.randn(400, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = []
    for spread in (0.0, 0.05, 0.1, 0.2, 0.3):
        rows = (spread * noise - spread**2 / 2).tolist()
        _, result = weights(rows, form, high=1e9)
        shares.append(result.effective_share)
        exponent = spread**2 if form == "token_truncate" else 10 * spread**2
        assert result.effective_share == pytest.approx(math.exp(-exponent), rel=0.15)
    assert shares == sorted(shares, reverse=True)


def test_an_empty_batch_and_extreme_ratios_give_finite_weights():
    assert importance_weights(torch.zeros(0), torch.zeros(0).long(), form="none", low=0, high=1).effective_share == 1.0
    found, result = weights([[1e4, -1e4]], "token_truncate", high=math.inf)
    assert all(map(math.isfinite, found[0]))
    assert 0 < result.effective_share <= 1


class Case:
    """A ragged batch with holes where an observation stands."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        count, length = 1 + seed % 6, 3 + seed % 9
        ends = torch.randint(1, length + 1, (count,), generator=generator)
        self.completion_mask = (torch.arange(length)[None] < ends[:, None]).long()
        self.tool_mask = (torch.rand(count, length, generator=generator) < 0.7).long()
        self.tool_mask[:, 0] = 1
        self.mask = self.completion_mask * self.tool_mask
        self.trainer = -torch.rand(count, length, generator=generator, dtype=torch.float64) - 0.1
        self.sampler = self.trainer + 0.4 * torch.randn(count, length, generator=generator, dtype=torch.float64)

    def ours(self, form: str) -> torch.Tensor:
        """Our weights, shape (B, T), 0 outside the mask."""
        episodes = torch.arange(len(self.mask))[:, None].expand(self.mask.shape)[self.mask.bool()]
        gaps = (self.trainer - self.sampler)[self.mask.bool()]
        found = importance_weights(gaps, episodes, form=form, low=LOW, high=HIGH).weights_N.double()
        return torch.zeros(self.mask.shape, dtype=torch.float64).masked_scatter(self.mask.bool(), found)


def trl_weights(case: Case, form: str) -> torch.Tensor:
    """Runs TRL's own lines unchanged; they are in the middle of a method."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed").GRPOTrainer
    method = parse_python(textwrap.dedent(inspect.getsource(trainer._generate_and_score_completions)))
    (block,) = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.If)
        and "vllm_importance_sampling_correction" in ast.unparse(node.test)
        and any(isinstance(one, ast.Assign) and "per_token_logps_diff" in ast.unparse(one) for one in node.body)
    ]
    names = {
        "self": SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=form,
            # TRL's truncation has a lower bound too; slime's and ours have none.
            vllm_importance_sampling_clip_min=LOW if form.endswith("mask") else None,
            vllm_importance_sampling_clip_max=HIGH,
        ),
        "completion_mask": case.completion_mask,
        "tool_mask": case.tool_mask,
        "old_per_token_logps": case.trainer,
        "sampling_per_token_logps": case.sampler,
        "torch": torch,
        "math": math,
    }
    exec(compile(ast.Module([block], []), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"].expand(case.mask.shape) * case.mask


@pytest.mark.parametrize("form", FORMS_OF_TRL)
def test_weights_equal_trls(form: str):
    for seed in range(30):
        case = Case(seed)
        assert torch.allclose(case.ours(form), trl_weights(case, form), rtol=0, atol=1e-6)


def slime_folder() -> Path:
    folder = Path(os.environ.get("OSWORLD_PEERS", "/nonexistent")) / "slime-rl"
    if not folder.is_dir():
        pytest.skip("OSWORLD_PEERS names no folder with a checkout of slime, slime-rl/")
    return folder


def slime_mis(case: Case, form: str) -> torch.Tensor:
    """Computed by examples/train_infer_mismatch_helper/mis.py."""
    spec = importlib.util.spec_from_file_location("mis", slime_folder() / "examples/train_infer_mismatch_helper/mis.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    is_rejection = form == "sequence_reject"
    settings = SimpleNamespace(
        use_tis=True,
        tis_level="token" if is_rejection else form.split("_")[0],
        tis_mode="truncate" if is_rejection else form.split("_")[1],
        tis_lower_bound=LOW,
        tis_upper_bound=HIGH,
        use_rs=is_rejection,
        rs_level="geometric",
        rs_lower_bound=LOW,
        rs_upper_bound=HIGH,
        rs_veto_threshold=None,
        tis_batch_normalize=False,
    )
    found, masks, _ = module.compute_mis_weights(
        settings,
        train_log_probs=list(case.trainer),
        rollout_log_probs=list(case.sampler),
        loss_masks=list(case.mask),
    )
    kept = torch.stack(masks).double()
    return kept if is_rejection else torch.stack(found).double() * kept


@pytest.mark.parametrize("form", [*FORMS_OF_TRL, "sequence_reject"])
def test_weights_equal_slimes_mis(form: str):
    for seed in range(30):
        case = Case(seed)
        assert torch.allclose(case.ours(form), slime_mis(case, form), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "name"), [("token_truncate", "vanilla_tis_function"), ("token_mask", "icepop_function")]
)
def test_token_weights_equal_slimes_own(form: str, name: str):
    # The module needs Megatron; the function does not.
    source = (slime_folder() / "slime/backends/megatron_utils/loss.py").read_text()
    (function,) = [
        node for node in parse_python(source).body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    function.returns = None
    for argument in [*function.args.args, *function.args.kwonlyargs, function.args.kwarg]:
        argument.annotation = None
    names = {"torch": torch}
    exec(compile(ast.Module([function], []), "slime", "exec"), names)
    for seed in range(30):
        case = Case(seed)
        settings = SimpleNamespace(tis_clip=HIGH, tis_clip_low=LOW if form == "token_mask" else 0)
        ones = torch.ones(case.mask.numel(), dtype=torch.float64)
        found, _, _ = names[name](
            settings,
            pg_loss=ones,
            train_log_probs=list(case.trainer),
            rollout_log_probs=list(case.sampler),
            loss_masks=list(case.mask),
        )
        assert torch.allclose(case.ours(form), found.view(case.mask.shape) * case.mask, rtol=0, atol=1e-6)
