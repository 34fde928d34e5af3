"""One policy on one rank with torch and a Hugging Face causal language model.

The gradient of an update is a sum over its completion tokens, accumulated in ``p.grad`` over any number of
micro-batches in any order, of any of the policy's agents; ``TorchPolicy.optimizer_step`` divides it once by the
update's count of tokens or sequences. So training while other rollouts still run is the same computation as training
after a barrier, and the gradient of several agents' samples is that of one batch of all of them.

An algorithm that does not stream needs the whole step for its first gradient: its samples are held until then. PPO
streams: its critic steps when the policy does, so within a step a sample's values need that sample alone.

A step has one update, or several: then the samples of the others are held too, see ``held_samples.py``. All updates of
a step are one call of ``optimizer_step``, so that a policy is never between two of them for anyone else: it is
suspended, saved and published before or after all of them, and a step that is repeated begins with the first.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .....core.telemetry import get_logger
from ....compared_logprobs import Compared
from ....errors import NonFiniteGradient, TooManyTokens
from ....messages import LikelyTokens, Sample, StepStats
from ....names import PolicyName
from ...objective.critic import explained_variance
from ...objective.loss import denominator
from ...objective.objective import step_advantages, step_kl
from ...objective.users_loss import UsersLoss
from ...padding import TokenRow
from ...shards import Shard
from ...trainer_setup import PolicySetup
from ..policy_backend import MicroBatchStats, PolicyBackend, TrainingStep
from .adamw import apply_gradient, drop_gradient, forget_moments, gradient_norm, learning_rate
from .checked_samples import checked_samples
from .completion_model import derived_seed, dropout_settings
from .forward_batches import TrainedSample
from .frozen_base import FrozenBases
from .gang_rank import ALONE, GangRank
from .held_samples import HeldSample, count_tokens, divide_updates, update_of
from .policy_position import PolicyPosition, read_position
from .sample_gradients import SampleGradients
from .step_totals import StepTotals
from .trained_models import TrainedModels, copy_into
from .weights_probe import weights_probe

log = get_logger(__name__)


class _Update(NamedTuple):
    """``divisor``: of its gradient, whose ``norm`` is that before clipping."""

    divisor: int
    norm: float
    skipped: bool


class TorchPolicy(PolicyBackend):
    """A policy on one device. ``model`` is the live module, its parameters the master weights.

    It is one class because a micro-batch, an optimizer step and a move of the state change one position in the step.
    """

    def __init__(
        self,
        name: PolicyName,
        setup: PolicySetup,
        *,
        seed: int,
        total_steps: int,
        models: TrainedModels | None = None,
        gang: GangRank = ALONE,
        bases: FrozenBases | None = None,
        users_loss: UsersLoss | None = None,
    ) -> None:
        """``seed`` is the run's: the policy's own derives from it and ``name``. ``total_steps``: of the run.

        ``models``: built for such a ``setup``; None: built now, with the initial weights, and divided over ``gang``.
        ``bases``: of this process, for a LoRA policy; None: one of its own. ``users_loss``: of the ``setup``'s loss.
        """
        self.name = name
        self._setup, self._loss = setup, setup.loss
        self._total_steps = total_steps
        used = models is not None
        self.models = models = models or TrainedModels(
            setup, derived_seed(seed, name), gang, bases or FrozenBases(seed)
        )
        self._gang = models.gang
        self._critic = models.critic
        self.model, self._optimizer = models.completions.model, models.optimizer
        if dropouts := dropout_settings(self.model):
            log.info("dropout of the model's config is not used, as in the engine", policy=name, **dropouts)
        # A gradient that an earlier policy left in ``models`` is dropped when a state is loaded.
        self._position = PolicyPosition(accumulated=used)
        self._gradients = SampleGradients(setup, models, users_loss)

    @property
    def version(self) -> int:
        """Optimizer steps taken; the schedule's position too."""
        return self._position.version

    # ----------------------------------------------------------------------- SFT

    def sft(self, examples: Sequence[TokenRow]) -> float:
        """See ``PolicyBackend.sft``: mean cross entropy per completion token, one AdamW step."""
        if self._position.version or self._position.totals.samples:
            raise RuntimeError(f"policy {self.name}: SFT after reinforcement learning has begun")
        with self._named_shortage():
            self._position.accumulated = True
            loss = self._gradients.backward_examples(examples)
        norm = gradient_norm(self.models.parameters, 1, self._gang)
        if not math.isfinite(norm):
            raise NonFiniteGradient(self.name, self._position.version, norm)
        self._apply_gradient(1, norm, self._setup.sft.lr)
        self._position.accumulated = False
        self._position.sft_batches += 1
        self._position.sft_loss = self._gang.sum(loss).item()
        return self._position.sft_loss

    def sft_done(self) -> None:
        """See ``PolicyBackend.sft_done``. Does nothing without a SFT."""
        if not self._position.sft_batches:
            return
        log.info(
            "warmed up", policy=self.name, batches=self._position.sft_batches, loss=self._position.sft_loss
        )
        forget_moments(self._optimizer)
        self.models.start_from_here()
        self._position.sft_batches = 0

    def start_from(self, folder: Path) -> None:
        self.models.start_from(folder)

    # ----------------------------------------------------------------------- reinforcement learning

    def accumulate(self, batch: Sequence[Sample]) -> MicroBatchStats:
        """See ``PolicyBackend.accumulate``.

        A sample whose advantage is exactly 0 has no gradient, unless a KL or an entropy bonus is in the loss, or a
        critic learns from it: its tokens count, the model never sees it.
        """
        started = perf_counter()
        if self._position.sft_batches:
            raise RuntimeError(f"policy {self.name}: call sft_done() before reinforcement learning")
        checked = self._check_samples(batch)
        totals = StepTotals(len(batch), sum(len(sample.tokens) for sample in batch))
        totals.stale = sum(sample.policy_version < self._position.version for sample in batch)
        if self._gang.size > 1 or not self._loss.streams:
            self.models.completions.check([(sample.prompt_tokens, sample.tokens) for sample in batch])
        if self._loss.streams:
            updates = self._setup.updates
            with self._named_shortage():
                self._backward([row for row in checked if not update_of(row.sample, updates)], totals)
                later = [row for row in checked if update_of(row.sample, updates)]
                self._position.held += map(HeldSample.of, self._gradients.at_begin(later))
        else:
            self._position.held += map(HeldSample, batch)
        self._position.baselines.note(self._setup.credit, batch)
        self._position.totals.add(totals)
        return MicroBatchStats(
            samples=totals.samples,
            tokens=totals.tokens,
            trained_samples=len(batch) if self._critic else sum(row.has_signal for row in checked),
            seconds=perf_counter() - started,
        )

    def take_compared(self) -> dict[str, Compared]:
        return self._gradients.take_compared()

    @contextmanager
    def _named_shortage(self) -> Iterator[None]:
        """Raises TooManyTokens in place of PyTorch's error, which names no setting."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            tokens = self._setup.torch_trainer.tokens_per_forward
            raise TooManyTokens(self.name, tokens, str(error)) from error

    def _check_samples(self, batch: Sequence[Sample]) -> list[TrainedSample]:
        position = self._position
        return checked_samples(batch, self.name, self._setup, position.version, position.baselines)

    def _backward(
        self, samples: Sequence[TrainedSample], totals: StepTotals, *, changed: bool = False
    ) -> None:
        """Adds the gradient of ``samples``, and their sums to ``totals``. ``changed``: the policy has, since the step's
        begin."""
        self._position.accumulated |= self._gradients.trains(samples)
        self._gradients.backward(samples, totals, self._position.version, changed=changed)

    def _later_updates(self) -> list[list[TrainedSample]]:
        """The samples of each update behind the first, whose gradient is there when this returns."""
        held, self._position.held = self._position.held, []
        samples = [row.sample for row in held]
        if not self._loss.streams:
            return self._backward_held(samples)
        arrived = self._check_samples(samples)
        rows = [row.trained(float(checked.advantage)) for row, checked in zip(held, arrived, strict=True)]
        return divide_updates(rows, self._setup.updates)[1:]

    def _backward_held(self, samples: Sequence[Sample]) -> list[list[TrainedSample]]:
        """The same if all ``samples`` of the step were held: adds the gradient of the first update."""
        references = self._gradients.reference_logprobs(samples) if self._loss.penalises_rewards else None
        arrived = [float(row.advantage) for row in self._check_samples(samples)]
        tokens = step_advantages(self._loss, self._setup.credit, samples, arrived, references)
        advantages = tokens.numpy().astype(np.float32)
        ends = np.cumsum([len(sample.tokens) for sample in samples])[:-1]
        rows = list(map(TrainedSample, samples, np.split(advantages, ends)))
        first, later = rows, list[list[TrainedSample]]()
        if self._setup.updates > 1:
            first, *parts = divide_updates(rows, self._setup.updates)
            later = [self._gradients.at_begin(part) for part in parts]
        totals = StepTotals()
        self._backward(first, totals)
        if references is not None:
            totals.sums["kl"] = step_kl(samples, references)
        self._position.totals.add(totals)
        return later

    def optimizer_step(self, run_step: int | None = None) -> StepStats:
        """See ``PolicyBackend.optimizer_step``: for each update divide by its count, clip, AdamW, schedule."""
        with self._named_shortage():
            later = self._later_updates() if self._position.held else []
        position = self._position.version if run_step is None else run_step
        lr = learning_rate(self._setup.optimizer, position, self._total_steps)
        totals = self._position.totals
        samples = totals.samples - sum(map(len, later))
        roles = self._gradients.take_role_shares(samples)
        tokens = totals.tokens - sum(map(count_tokens, later))
        # An update can be without samples if groups were dropped: nothing to step with, not even by the momentum.
        updates = [self._update(samples, tokens, lr, position)] if samples or not any(later) else []
        for part in filter(None, later):
            of_part = StepTotals()
            with self._named_shortage():
                self._backward(part, of_part, changed=True)
            totals.add(of_part)
            updates.append(self._update(len(part), count_tokens(part), lr, position))
        self._check_deviation(totals)
        self._position.step(self._setup.credit)
        figures = totals.figures(sum(update.divisor for update in updates))
        figures["grad_norm"] = sum(update.norm for update in updates) / len(updates)
        figures |= {"lr": lr, "skipped_updates": sum(update.skipped for update in updates)}
        figures["unsure_tokens"] = round(totals.sums.get("unsure_tokens", 0.0))
        if self._critic is not None:
            figures["value_loss"] = totals.value_loss
            if (explained := explained_variance(totals.tokens, totals.values)) is not None:
                figures["explained_variance"] = explained
        finite = {name: value if math.isfinite(value) else 0.0 for name, value in figures.items()}
        shares = totals.agent_shares(self._setup.credit)
        for agent, share in roles.items():
            shares[agent] = {**shares.get(agent, {}), **share}
        return StepStats(totals.samples, totals.tokens, finite, shares)

    def _update(self, samples: int, tokens: int, lr: float, position: int) -> _Update:
        """Divides the accumulated gradient, steps policy and critic with it."""
        divisor = denominator(
            self._loss.aggregation,
            tokens=tokens,
            sequences=samples,
            constant=self._loss.constant_length,
        )
        norm = gradient_norm(self.models.parameters, divisor, self._gang)
        return _Update(divisor, norm, self._step_models(max(1, tokens), divisor, norm, lr, position))

    def _step_models(self, tokens: int, divisor: int, grad_norm: float, lr: float, position: int) -> bool:
        """Steps policy and critic, and zeroes their gradients; True if the policy's weights stay as they are.

        Raises NonFiniteGradient before anything is touched, unless the update is skipped.
        """
        critic = self._critic
        critic_norm = critic.gradient_norm(tokens) if critic else 0.0
        if not (math.isfinite(grad_norm) and math.isfinite(critic_norm)):
            self._skip_non_finite(critic_norm if math.isfinite(grad_norm) else grad_norm)
            return True
        self._position.non_finite_steps = 0
        if critic is not None:
            critic.optimizer_step(tokens, critic_norm, position, self._total_steps)
        if grad_norm == 0.0 and self._setup.optimizer.zero_gradient == "skip":
            drop_gradient(self._optimizer)
            return True
        self._apply_gradient(divisor, grad_norm, lr)
        return False

    def _skip_non_finite(self, norm: float) -> None:
        """Drops the step's gradients. Raises NonFiniteGradient if the step may not be skipped."""
        config = self._setup.optimizer
        if (
            config.non_finite_gradient == "end"
            or self._position.non_finite_steps >= config.max_non_finite_steps
        ):
            raise NonFiniteGradient(self.name, self._position.version, norm)
        self._position.non_finite_steps += 1
        log.warning(
            "the gradient is not finite: the update is left out",
            policy=self.name,
            version=self._position.version,
            in_a_row=self._position.non_finite_steps,
            max_non_finite_steps=config.max_non_finite_steps,
        )
        self.models.drop_gradients()

    def _check_deviation(self, totals: StepTotals) -> None:
        """Logs a warning if trainer and engine disagree on samples of one and the same version: in the 1st, 2nd, 4th,
        8th ... such step."""
        bound = self._loss.deviation_bound(self._setup.real_model.dtype)
        if totals.stale or totals.ratio_deviation <= bound:
            return
        self._position.deviating_steps += 1
        if self._position.deviating_steps & (self._position.deviating_steps - 1) == 0:
            log.warning(
                "trainer and engine disagree on the probabilities of tokens",
                policy=self.name,
                ratio_deviation=totals.ratio_deviation,
                bound=bound,
                bound_is=f"policies.{self.name}.algorithm.ratio_deviation_warning",
                steps=self._position.deviating_steps,
                likely_causes="randomness in the model's forward, an engine with other weights or another "
                "temperature, an engine that changes its probabilities (penalties), a lower precision",
            )

    # ----------------------------------------------------------------------- the optimizer

    def _apply_gradient(self, divisor: int, norm: float, lr: float) -> None:
        apply_gradient(
            self.models.parameters,
            self._optimizer,
            divisor=divisor,
            norm=norm,
            max_norm=self._setup.optimizer.max_grad_norm,
            lr=lr,
        )

    # ----------------------------------------------------------------------- state, weights and files

    def base_state(self) -> dict[str, Tensor]:
        return self.models.base_state()

    def frozen_state(self) -> dict[str, Tensor]:
        return self.models.frozen_state()

    def parts(self) -> dict[str, Shard]:
        return self.models.parts()

    def step_state(self) -> TrainingStep:
        gradients = self.models.gradients() if self._position.accumulated else {}
        return TrainingStep(gradients, self._position.plain())

    def gradients(self) -> dict[str, Tensor]:
        return self.models.gradients()

    def load_state(self, step: TrainingStep) -> None:
        position = read_position(step.data)
        copy_into(self.models.gradients() if position.accumulated else {}, step.tensors)
        if self._position.accumulated and not position.accumulated:
            self.models.drop_gradients()
        self._position = position
        self._gradients.forget_step()

    def weights(self) -> dict[str, Tensor]:
        return self.models.published()

    def live_weights(self) -> dict[str, Tensor]:
        return self.models.live_weights()

    def weights_outline(self) -> dict[str, Tensor]:
        return self.models.weights_outline()

    def gather_weights(self, into: Mapping[str, Tensor]) -> None:
        self.models.gather_weights(into)

    def probe(self) -> tuple[LikelyTokens, ...]:
        every = self._setup.probe_every
        if not every or self.version % every:
            return ()
        with self._named_shortage():
            return weights_probe(self.models, self.name, self.version)

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self.models.save(folder, tokenizer, self._position.version, self._position.baselines.means)

    def load(self, folder: Path) -> None:
        """See ``PolicyBackend.load``. A SFT under way ends."""
        self._position = PolicyPosition.loaded(*self.models.load(folder))
