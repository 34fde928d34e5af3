"""Every algorithm's gradient of a step, before it is clipped, against its paper's formula in float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexmarl.actors.credit.algorithms import ALGORITHMS
from flexmarl.actors.messages import StepStats

from ... import papers
from ...algorithm import Algorithm, algorithm
from ...papers import PaperStep, PaperTurn
from ...users_losses import CLIPPED, CLIPPED_SEQUENCE
from .paper_steps import (
    LONGEST,
    entropies_of,
    first_logprobs,
    logprobs_of,
    make_policy,
    make_turns,
    samples_of,
    stepped_updates,
    train,
    values_of,
)

LOSSES: dict[str, Callable[[PaperStep], Tensor]] = {
    "grpo": papers.grpo,
    "dr_grpo": lambda step: papers.dr_grpo(step, LONGEST),
    "dapo": papers.dapo,
    "gspo": papers.gspo,
    "cispo": papers.cispo,
    "rloo": papers.rloo,
    "reinforce_pp": papers.reinforce_pp,
    "reinforce_pp_baseline": papers.reinforce_pp_baseline,
    "at_grpo": papers.at_grpo,
    "dr_mas": papers.dr_mas,
    "rae": papers.rae,
    "echo": papers.echo,
    "sa_gcpo": papers.sa_gcpo,
    "habc": papers.habc,
    "mnpo": papers.mnpo,
}


def gradient_of(loss: Tensor, model: torch.nn.Module) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_every_algorithm_has_a_formula() -> None:
    assert {*LOSSES, "ppo"} == set(ALGORITHMS)


@pytest.mark.parametrize(
    ("name", "beta"),
    # With a ratio, the KL term is in the test of every update.
    [(name, beta) for name, row in ALGORITHMS.items() for beta in ((0.0,) if row.has_ratio else (0.0, 0.1))],
)
def test_the_gradient_of_a_step_is_the_papers(
    name: str, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = algorithm(
        name=name, kl_coefficient=beta, **({"critic": {"max_grad_norm": 1e9}} if name == "ppo" else {})
    )
    check_gradients(of, 1, (2, 3, 5), "strict", monkeypatch)


@pytest.mark.parametrize(
    ("updates", "mode", "old_policy", "beta"),
    [
        (1, "async", "behaviour", 0.0),
        (2, "sync", "proximal", 0.1),
        (4, "async", "proximal", 0.0),
        (4, "strict", "behaviour", 0.1),
    ],
)
@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if row.has_ratio])
def test_the_gradient_of_every_update_is_the_papers_with_its_clip(
    name: str, updates: int, mode: str, old_policy: str, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = {"critic": {"max_grad_norm": 1e9}} if name == "ppo" else {}
    of = algorithm(name=name, kl_coefficient=beta, old_policy=old_policy, **critic)
    stats = check_gradients(of, updates, (2, 3, 5, 2, 4), mode, monkeypatch)
    deviation = stats.figures["old_ratio_deviation"]
    assert deviation > 1e-2, "the ratio is not 1"
    # The bound of cispo is 5, and the engine's probabilities differ by a factor of 3.
    if name != "mnpo" and (name != "cispo" or updates > 1):  # a regression has no clip
        assert stats.figures["clip_fraction"] > (0.0 if name == "cispo" else 0.05)


@pytest.mark.parametrize(
    ("updates", "mode", "old_policy", "beta"),
    [
        (1, "strict", "proximal", 0.0),
        (4, "sync", "proximal", 0.1),
        (2, "async", "behaviour", 0.0),
    ],
)
@pytest.mark.parametrize(("name", "loss"), [("dapo", CLIPPED), ("gspo", CLIPPED_SEQUENCE), ("ppo", CLIPPED)])
def test_a_loss_of_the_users_own_has_the_gradient_of_its_formula(
    name: str,
    loss: str,
    updates: int,
    mode: str,
    old_policy: str,
    beta: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    critic = {"critic": {"max_grad_norm": 1e9}} if name == "ppo" else {}
    of = algorithm(name=name, loss=loss, old_policy=old_policy, kl_coefficient=beta, **critic)
    check_gradients(of, updates, (2, 3, 5, 2, 4), mode, monkeypatch)


@pytest.mark.parametrize(
    ("given", "updates", "mode"),
    [
        ({"name": "grpo"}, 1, "strict"),
        ({"name": "grpo", "kl_coefficient": 0.1}, 2, "async"),
        ({"name": "dr_grpo"}, 2, "strict"),
        ({"name": "dapo"}, 1, "sync"),
        ({"name": "gspo"}, 4, "strict"),
        ({"name": "rloo"}, 1, "async"),
        ({"name": "reinforce_pp"}, 2, "strict"),
        ({"name": "ppo", "critic": {"max_grad_norm": 1e9}}, 2, "strict"),
    ],
    ids=str,
)
def test_an_entropy_bonus_adds_the_gradient_of_the_exact_entropies(
    given: dict[str, Any], updates: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = algorithm(**given, entropy_coefficient=0.3)
    stats = check_gradients(of, updates, (2, 3, 5, 2, 4), mode, monkeypatch)
    if updates == 1:
        model = make_policy(of).model
        with torch.no_grad():
            every = torch.cat([entropies_of(model, turn) for turn in make_turns(3, (2, 3, 5, 2, 4))[0]])
        assert stats.figures["entropy"] == pytest.approx(float(every.mean()), rel=1e-5)


def bonus(of: Algorithm, turns: Sequence[PaperTurn], model: Any) -> Tensor:
    """The entropies as the algorithm's loss has its tokens, times the coefficient."""
    each = [entropies_of(model, turn) for turn in turns]
    if of.loss.aggregation == "sequence_mean":
        mean = sum((row.mean() for row in each), torch.zeros(())) / len(each)
    else:
        tokens = {
            "token_mean": sum(map(len, each)),
            "sequence_sum": len(each),
            "constant": len(each) * LONGEST,
        }
        mean = sum((row.sum() for row in each), torch.zeros(())) / tokens[of.loss.aggregation]
    return of.loss.entropy_coefficient * mean


def check_gradients(
    of: Algorithm, updates: int, sizes: tuple[int, ...], mode: str, monkeypatch: pytest.MonkeyPatch
) -> StepStats:
    """Groups of ``sizes`` trajectories. Under ``async`` the samples are a version old, and under ``sync`` one
    micro-batch."""
    version, max_staleness = (-1, 1) if mode == "async" else (0, 0)
    policy = make_policy(of, updates=updates, max_staleness=max_staleness)
    turns, rewards = make_turns(3, sizes)
    assert len({len(turn.tokens) for turn in turns}) > 3 and len({turn.number for turn in turns}) == 3
    critic = None if policy._critic is None else policy._critic.model
    old_values = {} if critic is None else {turn: values_of(critic, turn).detach() for turn in turns}
    samples = samples_of(turns, rewards, of, version)
    if mode == "sync":
        policy.accumulate(samples)
    else:
        train(policy, samples, 3)
    stepped, stats = stepped_updates(policy, monkeypatch)
    assert len(stepped) == updates

    start = references = {turn: first_logprobs(turn) for turn in turns}
    if (reference := policy.models.reference) is not None:
        references = {turn: logprobs_of(reference.model, turn).detach() for turn in turns}
    whole = PaperStep(
        turns, [*start.values()], [*references.values()], rewards, of.loss.kl_coefficient, [*start.values()]
    )
    for number, update in enumerate(stepped):
        for model, weights in zip(filter(None, (policy.model, critic)), update.before, strict=True):
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.data.copy_(weight)
        of_update = [turn for turn in turns if turn.query % updates == number]
        step = replace(
            whole,
            turns=of_update,
            logprobs=[logprobs_of(policy.model, turn) for turn in of_update],
            reference=[references[turn] for turn in of_update],
            old=[start[turn] for turn in of_update],
            behaviour=of.loss.old_policy == "behaviour",
            whole=whole,
        )
        if critic is not None:
            values = [values_of(critic, turn) for turn in of_update]
            losses = papers.ppo(step, values, [old_values[turn] for turn in of_update])
            loss, further = losses[0], [gradient_of(losses[1], critic)]
        else:
            loss, further = LOSSES[of.loss.name](step), []
        if of.loss.entropy_coefficient:
            loss = loss - bonus(of, of_update, policy.model)
        expected = [gradient_of(loss, policy.model), *further]
        for ours, theirs in zip(update.gradients, expected, strict=True):
            # All sequences of gspo can be beyond its clip.
            assert theirs.norm() > 1e-3 or (of.loss.name == "gspo" and number and not theirs.any())
            assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm())
    return stats
