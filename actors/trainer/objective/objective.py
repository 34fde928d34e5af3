"""A policy's objective: the functions that its loss and its agents' credit assignment name, put together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...credit.credit_config import CreditConfig
from ...messages import Sample
from ...names import AgentName
from ..trainer_config import LossConfig
from .importance_weights import correction_weights
from .kl import kl_estimate
from .loss import bounded_ratio, sum_tokens
from .loss_inputs import LossInputs
from .token_losses import TokenLoss, token_loss_of
from .transforms import Critic, WholeStep


@dataclass(frozen=True, slots=True)
class CompletionTokens:
    """The completion tokens of one forward. All are ``[N]`` but ``lengths`` and ``group_sizes`` (``[R]`` int64) and
    ``rewards`` (``[R]``); ``logprobs`` has the gradient, ``engine_logprobs`` are those the tokens were drawn with
    (NaN: unknown), ``reference_logprobs`` are needed for a KL in the loss alone. ``old_logprobs``: of the policy at the
    step's begin; None if it has not changed since. ``entropies``: of the distributions, with the gradient; needed for
    an entropy bonus alone. ``columns``: of a user's loss, by name."""

    logprobs: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    lengths: Tensor
    group_sizes: Tensor
    rewards: Tensor
    reference_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)


def batch_loss(
    config: LossConfig, batch: CompletionTokens, users_loss: TokenLoss | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The summed loss of a batch, to be divided by the step's ``loss.denominator``. ``users_loss``: in the place of the
    algorithm's surrogate.

    The surrogate's ratio is that of the policy to the old policy. By default this is the proximal policy, the policy at
    the start of its step (decoupled PPO, Hilton et al., arXiv 2110.00641, section 3): no algorithm's clip range sees
    the rounding between engine and trainer. In the first update of a step the ratio's value is 1 and only its gradient
    is left; in the updates behind it the clip has something to hold back. The difference of the engine's policy from
    the proximal policy is the correction's weight. With the behaviour policy as the old one, the engine's, the ratio
    has both differences, and no weight is left.

    Returns ``(loss, sums)``: ``loss`` is a scalar with a gradient; ``sums`` are scalars without one, the sums over
    the tokens that become the figures of these names (``figures.py``), and ``advantage_squares``. Their names depend on
    the config and on the presence of optional tensors alone, so that the ranks of a gang can add them up. Raises
    ``ValueError`` if the KL's log-probabilities are missing, or the bonus's entropies.
    """
    # The trainer's own log-probabilities: the rounding of bfloat16 between engine and trainer (1e-2) exceeds the clip
    # range of gspo (3e-4), which learned nothing against the engine's.
    proximal = batch.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    # Of logged answers they may be unknown: a weight of 1.
    behaviour = torch.where(batch.engine_logprobs.isnan(), proximal, batch.engine_logprobs)
    batch = replace(batch, engine_logprobs=behaviour)
    weights, bounded = correction_weights(
        proximal,
        batch.engine_logprobs,
        config.correction,
        low=config.correction_low,
        high=config.correction_high,
    )
    clips_behaviour = config.old_policy == "behaviour"
    token_loss = users_loss or token_loss_of(config.row.surrogate)
    losses = token_loss(_inputs(config, batch, batch.engine_logprobs if clips_behaviour else proximal))
    values = losses.values * weights
    if config.kl_in_loss:
        if batch.reference_logprobs is None:
            raise ValueError("a KL in the loss needs the reference policy's log-probabilities")
        kl = kl_estimate(batch.logprobs, batch.reference_logprobs, config.kl_estimator)
        values = values + config.kl_coefficient * kl
    if config.entropy_coefficient > 0:
        if batch.entropies is None:
            raise ValueError("an entropy bonus needs the entropies")
        values = values - config.entropy_coefficient * batch.entropies
    loss = sum_tokens(values, batch.lengths, config.aggregation)
    return loss, _sums(config, batch, loss.detach(), losses.held_back | bounded, losses.ratio)


def idle_loss(config: LossConfig, batch: CompletionTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a forward that counts for nothing, whose gradient is 0, and sums of the names that ``batch_loss``
    gives. No loss function sees its tokens: a user's may divide by a reward or a column, which are 0, or by one less
    than the size of the group, and the gradient of all ranks would not be a number."""
    loss = batch.logprobs.sum()
    if batch.entropies is not None:
        loss = loss + batch.entropies.sum()
    loss = 0.0 * loss
    ratio = torch.ones_like(batch.logprobs)
    return loss, _sums(config, batch, loss.detach(), torch.zeros_like(ratio, dtype=torch.bool), ratio)


def _sums(
    config: LossConfig, batch: CompletionTokens, loss: Tensor, held_back: Tensor, ratio: Tensor
) -> dict[str, Tensor]:
    logprobs, references = batch.logprobs.detach(), batch.reference_logprobs
    proximal = logprobs if batch.old_logprobs is None else batch.old_logprobs
    advantages = batch.advantages.to(loss.dtype)
    # Sums, never means, as the loss: a step's micro-batches have different numbers of tokens.
    sums = {
        "loss": loss,
        "clip_fraction": held_back.sum().to(loss.dtype),
        "ratio_deviation": (bounded_ratio(proximal, batch.engine_logprobs) - 1.0).abs().sum(),
        # Estimated by the tokens that were drawn, unless a bonus needs the exact one: it takes a pass over [N, V].
        "entropy": -logprobs.sum() if batch.entropies is None else batch.entropies.detach().sum(),
        "advantage_mean": advantages.sum(),
        "advantage_squares": advantages.square().sum(),
    }
    if references is not None:
        # By one estimator, whichever the loss uses: so that the figure compares between algorithms.
        sums["kl"] = kl_estimate(logprobs, references, "k3").sum()
    if config.old_policy == "behaviour" or batch.old_logprobs is not None:
        sums["old_ratio_deviation"] = (ratio - 1.0).abs().sum()
    return sums


def _inputs(config: LossConfig, batch: CompletionTokens, old_logprobs: Tensor) -> LossInputs:
    return LossInputs(
        logprobs=batch.logprobs,
        old_logprobs=old_logprobs,
        behaviour_logprobs=batch.engine_logprobs,
        advantages=batch.advantages,
        lengths=batch.lengths,
        group_sizes=batch.group_sizes,
        rewards=batch.rewards,
        reference_logprobs=batch.reference_logprobs,
        entropies=batch.entropies,
        columns=batch.columns,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        options=config.options,
    )


def critic_advantages(
    config: LossConfig,
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    longest: int,
    engine_logprobs: Tensor,
    reference_logprobs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """PPO's advantages and the critic's returns, ``[N]`` each, without gradient and in the dtype of ``values``.

    ``rewards`` and ``lengths`` are ``[R]``, ``longest`` is the greatest of them, all others are ``[N]``. ``values``
    are the critic's at the step's begin: it steps when the policy does. So a sample's advantages need that sample
    alone; they are not normalised over the step.
    ``reference_logprobs`` are needed for a KL in the reward, which is between the engine's policy and the reference.
    """
    critic = next((transform for transform in config.transforms if isinstance(transform, Critic)), None)
    if critic is None:
        raise ValueError(f"{config.name} has no critic")
    penalties = torch.zeros_like(values)
    if config.penalises_rewards:
        penalties = _penalties(config, engine_logprobs.to(values.dtype), reference_logprobs)
    return critic.of_forward(rewards, penalties, values, lengths, longest)


def step_advantages(
    config: LossConfig,
    credit: Mapping[AgentName, CreditConfig],
    samples: Sequence[Sample],
    advantages: Iterable[float],
    reference_logprobs: Sequence[Tensor] | None,
) -> Tensor:
    """The advantages of all completion tokens of a step, for a loss that doesn't stream: ``[N]`` float64.

    ``samples`` (at least one) are those of the step, of all of the policy's agents; ``advantages`` are theirs
    (``advantage_of_sample``); ``credit`` is by agent. ``reference_logprobs`` has ``[T]`` for each sample and is needed
    for a KL in the reward alone. That KL is between the engine's policy, which drew the tokens, and the reference.
    """
    float64 = torch.float64
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    penalties = torch.zeros(int(lengths.sum()), dtype=float64)
    if config.penalises_rewards:
        references = None if reference_logprobs is None else torch.cat(list(reference_logprobs))
        penalties = _penalties(config, _engine_logprobs(samples), references)
    step = WholeStep(
        samples, {agent: settings.grouping for agent, settings in credit.items()}, lengths, penalties
    )
    # In float64: samples come in another order in every run, and a sum of float32 would show it.
    tokens = torch.tensor([*advantages], dtype=float64).repeat_interleave(lengths)
    for transform in config.transforms:
        tokens = transform.of_step(tokens, step)
    return tokens


def _penalties(config: LossConfig, engine_logprobs: Tensor, reference_logprobs: Tensor | None) -> Tensor:
    """The KL in the rewards, by token, times its coefficient."""
    if reference_logprobs is None:
        raise ValueError("a KL in the reward needs the reference policy's log-probabilities")
    return config.kl_coefficient * kl_estimate(engine_logprobs, reference_logprobs, config.kl_estimator)


def step_kl(samples: Sequence[Sample], reference_logprobs: Sequence[Tensor]) -> float:
    """The sum over the tokens of ``samples`` of the estimate ``k3`` of the KL between the engine's policy and the
    reference, as in ``step_advantages``."""
    return float(kl_estimate(_engine_logprobs(samples), torch.cat(list(reference_logprobs)), "k3").sum())


def _engine_logprobs(samples: Sequence[Sample]) -> Tensor:
    """The log-probabilities that the tokens were drawn with: ``[N]`` float64."""
    drawn = [logprob for sample in samples for logprob in sample.logprobs]
    return torch.tensor(drawn, dtype=torch.float64)
