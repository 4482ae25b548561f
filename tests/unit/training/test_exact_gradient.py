"""The expected update, by enumeration: over all sequences of a tabular policy it equals the gradient of the stated
objective under the sampling distribution, at every temperature, with masks and bans, for full and low-rank tables.
There is no sampling noise."""

import itertools
import math

import pytest
import torch
from tabular_policy import (
    BANNED,
    INDEX,
    SEQUENCES,
    STATES,
    TEMPERATURES,
    VOCAB,
    log_probability,
    random_table,
    token_log_ratios,
)

from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.rollout.engines.transformers_choice import choose_tokens
from osworld_pipeline.training.objective.advantage import compute_advantages
from osworld_pipeline.training.objective.importance import importance_weights
from osworld_pipeline.training.objective.loss import policy_loss, token_logprobs
from osworld_pipeline.training.update import turn_shares

ALGORITHMS = ("gspo", "grpo")
LENGTH = max(len(one.token_ids) for one in SEQUENCES)
MASK_BT = torch.tensor([[*one.mask, *[0] * (LENGTH - len(one.mask))] for one in SEQUENCES])
LENGTHS = torch.tensor([len(one.responses) for one in SEQUENCES], dtype=torch.float64)
REWARDS = torch.tensor([one.reward for one in SEQUENCES], dtype=torch.float64)
OPEN = {"clip_low": 0.2, "clip_high": 0.2}


def trainer_logprobs(table: torch.Tensor, temperature: float) -> torch.Tensor:
    """Computed by the code under test; shape (B, T)."""
    states = [INDEX[state] for one in SEQUENCES for state in one.states]
    targets = torch.tensor([token for one in SEQUENCES for token in one.responses])
    hidden = torch.nn.functional.one_hot(torch.tensor(states), len(STATES)).double()
    picked, _ = token_logprobs(
        hidden,
        targets,
        lambda rows: rows @ table,
        vocab_size=VOCAB,
        temperature_N=torch.full((len(targets),), temperature, dtype=torch.float64),
        banned_ids=torch.tensor([BANNED]),
        max_chunk_logits=7 * VOCAB,
    )
    return torch.zeros(MASK_BT.shape, dtype=torch.float64).masked_scatter(MASK_BT.bool(), picked)


def probabilities(table: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.stack([log_probability(table, one, temperature) for one in SEQUENCES]).exp()


def expected_update(table, sampler, advantages, temperature: float, *, algorithm: str, **choices) -> torch.Tensor:
    """That of one sequence drawn from the sampler, by the code under test: the sum over y of p_sampler(y) times the
    gradient of the loss of the batch [y]."""
    logprobs = trainer_logprobs(table, temperature)
    loss = policy_loss(
        logprobs,
        logprobs.detach(),
        advantages,
        MASK_BT,
        algorithm=algorithm,
        weights_B=probabilities(sampler, temperature).detach(),
        num_sequences=1,
        **OPEN,
        **choices,
    ).loss
    (gradient,) = torch.autograd.grad(loss, table)
    return gradient


def objective_gradient(table: torch.Tensor, values: torch.Tensor, temperature: float) -> torch.Tensor:
    """Minus the gradient of the sum over y of p(y) value(y): a loss goes down where the objective goes up."""
    (gradient,) = torch.autograd.grad(-(probabilities(table, temperature) * values).sum(), table)
    return gradient


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    assert float(other.norm()) > 1e-3
    assert float((one - other).norm() / other.norm()) < 1e-6


def test_the_probabilities_of_all_enumerated_sequences_sum_to_one():
    for temperature in TEMPERATURES:
        assert float(probabilities(random_table(1), temperature).sum()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_sampler_reports_the_distribution_that_it_samples(temperature: float):
    table, count = random_table(1).float(), 4000
    chances = [(index + 0.5) / count for index in range(count)]
    banned = torch.zeros(VOCAB, dtype=torch.bool)
    banned[BANNED] = True
    for state in range(0, len(STATES), 5):
        samplings = [SamplingParams(temperature=temperature)] * count
        ids, logprobs = choose_tokens(table[state].expand(count, -1), samplings, chances, banned)
        reported = dict(zip(ids, logprobs, strict=True))
        assert BANNED not in reported
        for token, logprob in reported.items():
            assert ids.count(token) / count == pytest.approx(math.exp(logprob), abs=2 / count)
        assert sum(map(math.exp, reported.values())) == pytest.approx(1.0, abs=5e-3)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_trainer_scores_the_distribution_that_is_sampled(algorithm: str, temperature: float):
    table = random_table(1)
    sums = trainer_logprobs(table, temperature).sum(-1)
    assert torch.allclose(sums.exp(), probabilities(table, temperature), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_on_policy_the_expected_update_is_the_gradient_of_the_mean_reward_per_token(algorithm: str, temperature: float):
    # sequence_mean: E[R / |y|].
    table = random_table(1).requires_grad_()
    update = expected_update(table, table, REWARDS, temperature, algorithm=algorithm)
    assert_equal(update, objective_gradient(table, REWARDS / LENGTHS, temperature))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_with_length_norm_constant_it_is_the_gradient_of_the_mean_reward(algorithm: str, temperature: float):
    table = random_table(2).requires_grad_()
    update = expected_update(
        table, table, REWARDS, temperature, algorithm=algorithm, length_norm="constant", max_response_tokens=9
    )  # fmt: skip
    assert_equal(update, objective_gradient(table, REWARDS / 9, temperature))


@pytest.mark.parametrize("temperature", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_choice_that_cannot_change_the_reward_gets_no_gradient(algorithm: str, temperature: float):
    # No reward depends on the first token. The rest of the table is the same after each, so nothing else does.
    table = random_table(3)
    for state in STATES:
        if state:
            table[INDEX[state]] = table[INDEX[(1, *state[1:])]]
    table.requires_grad_()
    choices = {"algorithm": algorithm, "length_norm": "constant", "max_response_tokens": 3}
    update = expected_update(table, table, REWARDS, temperature, **choices)
    assert float(update.norm()) > 1e-2
    assert float(update[INDEX[()]].norm()) < 1e-9 * float(update.norm())


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_low_rank_table_gets_the_gradient_through_its_factors(temperature: float):
    generator = torch.Generator().manual_seed(5)
    base = random_table(4)
    a = (0.3 * torch.randn(2, VOCAB, generator=generator, dtype=torch.float64)).requires_grad_()
    b = (0.3 * torch.randn(len(STATES), 2, generator=generator, dtype=torch.float64)).requires_grad_()
    table = base + b @ a
    through = torch.autograd.grad(
        table, [a, b], expected_update(table, table, REWARDS, temperature, algorithm="gspo"), retain_graph=True
    )
    objective = -(probabilities(table, temperature) * REWARDS / LENGTHS).sum()
    for mine, exact in zip(through, torch.autograd.grad(objective, [a, b]), strict=True):
        assert_equal(mine, exact)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("estimator", "scale"), [("leave_one_out", 1.0), ("mean", 0.5)])
def test_a_groups_expected_update_over_all_pairs_is_the_gradient_too(temperature: float, estimator: str, scale: float):
    # A baseline from the others has no bias; the group's own mean scales it by (n - 1) / n.
    table = random_table(6).requires_grad_()
    chances = probabilities(table, temperature).detach()
    # The pair's update is linear in each member's advantage, so a member's expected advantage given itself suffices.
    advantages = torch.zeros(len(SEQUENCES), dtype=torch.float64)
    for one, other in itertools.product(range(len(SEQUENCES)), repeat=2):
        pair = compute_advantages([float(REWARDS[one]), float(REWARDS[other])], estimator)
        advantages[one] += chances[other] * pair[0]
    update = expected_update(table, table, advantages, temperature, algorithm="grpo")
    mean = float((chances * REWARDS).sum())
    assert_equal(update, scale * objective_gradient(table, (REWARDS - mean) / LENGTHS, temperature))


def weights_of(table: torch.Tensor, sampler: torch.Tensor, temperature: float, form: str, **bounds) -> torch.Tensor:
    """Computed by the code under test; shape (B, T)."""
    gap = (trainer_logprobs(table, temperature) - trainer_logprobs(sampler, temperature)).detach()
    episodes = torch.arange(len(SEQUENCES))[:, None].expand(MASK_BT.shape)[MASK_BT.bool()]
    weights = importance_weights(gap[MASK_BT.bool()], episodes, form=form, **bounds).weights_N
    return torch.zeros(MASK_BT.shape, dtype=torch.float64).masked_scatter(MASK_BT.bool(), weights.double())


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_off_policy_the_whole_sequence_s_weight_gives_the_on_policy_gradient(algorithm: str, temperature: float):
    table, sampler = random_table(1).requires_grad_(), random_table(1) + random_table(8, scale=0.3) * 0.5
    weights = weights_of(table, sampler, temperature, "sequence_truncate", low=0.0, high=1e9)
    update = expected_update(table, sampler, REWARDS, temperature, algorithm=algorithm, importance_BT=weights)
    assert_equal(update, objective_gradient(table, REWARDS / LENGTHS, temperature))
    # The mean over tokens in the exponent, GSPO's own ratio, does not.
    episodes = torch.arange(len(SEQUENCES))[:, None].expand(MASK_BT.shape)[MASK_BT.bool()]
    gap = (trainer_logprobs(table, temperature) - trainer_logprobs(sampler, temperature)).detach()[MASK_BT.bool()]
    means = torch.stack([gap[episodes == index].mean() for index in range(len(SEQUENCES))]).exp()[:, None]
    biased = expected_update(
        table, sampler, REWARDS, temperature, algorithm=algorithm, importance_BT=means.expand(MASK_BT.shape)
    )  # fmt: skip
    exact = objective_gradient(table, REWARDS / LENGTHS, temperature)
    assert float((biased - exact).norm() / exact.norm()) > 0.05


def stated_weight(form: str, ratios: list[float], low: float, high: float) -> list[float]:
    """The weight of each token, from the table in training/objective/importance.py."""
    tokens = [math.exp(value) for value in ratios]
    whole, mean = math.exp(sum(ratios)), math.exp(sum(ratios) / len(ratios))
    return {
        "none": [1.0] * len(tokens),
        "token_truncate": [min(one, high) for one in tokens],
        "token_mask": [one if low <= one <= high else 0.0 for one in tokens],
        "sequence_truncate": [min(whole, high)] * len(tokens),
        "sequence_mask": [whole if low <= whole <= high else 0.0] * len(tokens),
        "sequence_reject": [1.0 if low <= mean <= high else 0.0] * len(tokens),
    }[form]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize(
    "form", ["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_reject"]
)
def test_off_policy_each_form_gives_the_gradient_of_its_stated_surrogate(form: str, temperature: float):
    # The sum over y of p_sampler(y) times the mean over tokens of w_t R(y) r_t, r_t the ratio to the frozen trainer.
    table, sampler = random_table(1).requires_grad_(), random_table(1) + random_table(9, scale=0.6) * 0.5
    low, high = 0.8, 1.3
    weights = weights_of(table, sampler, temperature, form, low=low, high=high)
    update = expected_update(table, sampler, REWARDS, temperature, algorithm="grpo", importance_BT=weights)
    total = table.new_zeros(())
    changed = 0
    for one, chance in zip(SEQUENCES, probabilities(sampler, temperature).detach(), strict=True):
        stated = stated_weight(form, token_log_ratios(table.detach(), sampler, one, temperature), low, high)
        changed += sum(weight in (0.0, high) for weight in stated)
        for state, token, weight in zip(one.states, one.responses, stated, strict=True):
            allowed = [each for each in range(VOCAB) if each != BANNED]
            row = table[INDEX[state]][allowed] / temperature
            logprob = row[allowed.index(token)] - torch.logsumexp(row, 0)
            total = total - chance * weight * one.reward / len(one.responses) * (logprob - logprob.detach()).exp()
    assert form == "none" or changed > 5
    (exact,) = torch.autograd.grad(total, table)
    assert_equal(update, exact)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_turns_of_a_window_weighted_by_tokens_give_the_update_of_the_whole_episode(algorithm: str):
    # Each response is a sequence of its own, with its share of the episode's weight.
    table, temperature = random_table(1).requires_grad_(), 0.5
    whole = expected_update(table, table, REWARDS, temperature, algorithm=algorithm)
    parts = [windows_of(index) for index in range(len(SEQUENCES))]
    logprobs = trainer_logprobs(table, temperature)
    rows, masks, advantages, weights = [], [], [], []
    for index, turns in enumerate(parts):
        shares = turn_shares(turns, "token")
        for turn in turns:
            rows.append(logprobs[index])
            masks.append([*turn.response_mask, *[0] * (LENGTH - len(turn.response_mask))])
            advantages.append(REWARDS[index])
            weights.append(probabilities(table, temperature)[index].detach() * shares[turn.trajectory_id])
    stacked = torch.stack(rows)
    loss = policy_loss(
        stacked,
        stacked.detach(),
        torch.stack(advantages),
        torch.tensor(masks),
        algorithm=algorithm,
        weights_B=torch.stack(weights),
        num_sequences=1,
        **OPEN,
    ).loss
    (update,) = torch.autograd.grad(loss, table)
    assert_equal(update, whole)


def windows_of(index: int):
    """The first response, and those after the observation, as trajectories of one episode."""
    one = SEQUENCES[index]
    starts = [(1, 2), (3, len(one.token_ids))] if len(one.responses) > 1 else [(1, 2)]
    return [
        Trajectory(
            trajectory_id=f"e{index}#{turn}",
            task_id="t",
            token_ids=one.token_ids,
            response_mask=tuple(int(start <= place < end) for place in range(len(one.token_ids))),
            images=(),
        )
        for turn, (start, end) in enumerate(starts)
    ]
