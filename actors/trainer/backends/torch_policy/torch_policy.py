"""One policy on one rank with torch and a Hugging Face causal language model.

The gradient of a step is a sum over its completion tokens, accumulated in ``p.grad`` over any number of micro-batches
in any order, of any of the policy's agents; ``TorchPolicy.optimizer_step`` divides it once by the step's count of
tokens or sequences. So training while other rollouts still run is the same computation as training after a barrier,
and the gradient of several agents' samples is that of one batch of all of them.

An algorithm that does not stream needs the whole step for its first gradient: its samples are held until then. PPO
streams: its critic steps when the policy does, so within a step a sample's values need that sample alone.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .....core.telemetry import get_logger
from ....errors import NonFiniteGradient, TooManyTokens
from ....messages import Sample, StepStats
from ....names import PolicyName
from ...objective.critic import explained_variance, value_loss, value_sums
from ...objective.loss import denominator
from ...objective.objective import CompletionTokens, batch_loss, critic_advantages, step_advantages, step_kl
from ...padding import TokenRow, pack_rows, pad_rows
from ...shards import Shard, divide
from ...trainer_setup import PolicySetup
from ..policy_backend import MicroBatchStats, PolicyBackend, TrainingStep
from .adamw import apply_gradient, drop_gradient, forget_moments, gradient_norm, learning_rate
from .checked_samples import checked_samples
from .completion_model import derived_seed, dropout_settings
from .critic_model import CriticModel
from .forward_batches import IDLE_ROWS, ROUNDING, Chunk, Chunks, TrainedSample, make_chunks
from .frozen_base import FrozenBases
from .gang_rank import ALONE, GangRank
from .policy_position import PolicyPosition, read_position
from .step_totals import StepTotals
from .trained_models import TrainedModels, copy_into

log = get_logger(__name__)


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
    ) -> None:
        """``seed`` is the run's: the policy's own derives from it and ``name``. ``total_steps``: of the run.

        ``models``: built for such a ``setup``; None: built now, with the initial weights, and divided over ``gang``.
        ``bases``: of this process, for a LoRA policy; None: one of its own.
        """
        self.name = name
        self._setup, self._loss = setup, setup.loss
        self._total_steps = total_steps
        self._device = torch.device(setup.real_model.device)
        used = models is not None
        self.models = models = models or TrainedModels(
            setup, derived_seed(seed, name), gang, bases or FrozenBases(seed)
        )
        self._gang = models.gang
        self._completions, self._reference, self._critic = models.completions, models.reference, models.critic
        self.model, self._optimizer = models.completions.model, models.optimizer
        self._vocab_size = models.completions.vocab_size
        if dropouts := dropout_settings(self.model):
            log.info("dropout of the model's config is not used, as in the engine", policy=name, **dropouts)
        # A gradient that an earlier policy left in ``models`` is dropped when a state is loaded.
        self._position = PolicyPosition(accumulated=used)

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
            loss = self._cross_entropy(examples)
            self._position.accumulated = True
            torch.autograd.backward(loss)
        norm = gradient_norm(self.models.parameters, 1, self._gang)
        if not math.isfinite(norm):
            raise NonFiniteGradient(self.name, self._position.version, norm)
        self._apply_gradient(1, norm, self._setup.sft.lr)
        self._position.accumulated = False
        self._position.sft_batches += 1
        self._position.sft_loss = self._gang.sum(loss.detach()).item()
        return self._position.sft_loss

    def _cross_entropy(self, examples: Sequence[TokenRow]) -> Tensor:
        """This rank's share of the mean over all completion tokens."""
        share = examples
        if self._gang.size > 1:
            self._completions.check(examples)
            lengths = np.array([len(prompt) + len(completion) for prompt, completion in examples], np.int64)
            share = [examples[index] for index in divide(lengths, self._gang.size)[self._gang.rank]]
        lay_out = pack_rows if self.models.packs else pad_rows
        rows = lay_out(share or IDLE_ROWS, self._vocab_size).with_tensors(lambda t: t.to(self._device))
        loss = -self._completions.logprobs(rows).sum() / sum(len(completion) for _, completion in examples)
        return loss if share else 0.0 * loss

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

        A sample whose advantage is exactly 0 has no gradient, unless a KL is in the loss or a critic learns from it:
        its tokens count, the model never sees it.
        """
        started = perf_counter()
        if self._position.sft_batches:
            raise RuntimeError(f"policy {self.name}: call sft_done() before reinforcement learning")
        checked = self._check_samples(batch)
        totals = StepTotals(len(batch), sum(len(sample.tokens) for sample in batch))
        totals.stale = sum(sample.policy_version < self._position.version for sample in batch)
        if self._gang.size > 1 or not self._loss.streams:
            self._completions.check([(sample.prompt_tokens, sample.tokens) for sample in batch])
        if self._loss.streams:
            with self._named_shortage():
                self._backward(checked, totals)
        else:
            self._position.held += batch
        self._position.baselines.note(self._setup.credit, batch)
        self._position.totals.add(totals)
        return MicroBatchStats(
            samples=totals.samples,
            tokens=totals.tokens,
            trained_samples=len(batch) if self._critic else sum(row.has_signal for row in checked),
            seconds=perf_counter() - started,
        )

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

    def _backward(self, samples: Sequence[TrainedSample], totals: StepTotals) -> None:
        """Adds the gradient of ``samples``, and their sums to ``totals``."""
        totals.note_agents(samples, self._critic is None)
        chunks = self._chunks(samples)
        self._position.accumulated |= bool(chunks)
        names: tuple[str, ...] = ()
        zero = total = torch.zeros((), device=self._device)  # float32 also for a policy of float64
        values = torch.zeros(4, dtype=torch.float64, device=self._device)
        padding = 0
        for chunk in chunks:
            references = self._reference_logprobs(chunk) if self._needs_references else None
            advantages = chunk.advantages
            if self._critic is not None:
                advantages = self._backward_values(self._critic, chunk, references, values)
            logprobs = self._completions.logprobs(chunk.rows, chunk.temperatures, chunk.truncations)
            tokens = CompletionTokens(logprobs, chunk.engine_logprobs, advantages, chunk.lengths, references)
            loss, sums = batch_loss(self._loss, tokens)
            unsure = None if chunk.truncations is None else chunk.truncations.unsure
            sums["unsure_tokens"] = zero if unsure is None else unsure.sum()
            names = tuple(sums)  # also of an idle chunk: all ranks need the same
            if chunk.idle:
                torch.autograd.backward(0.0 * loss)
                continue
            torch.autograd.backward(loss)
            total = total + torch.stack([value.to(total.dtype) for value in sums.values()])
            totals.trained_tokens += len(chunk.advantages)
            totals.positions += chunk.rows.input_ids.numel()
            padding += chunk.rows.padding
        if names:
            totals.sums["padding_share"] = float(padding)
            totals.read(names, total.expand(len(names)), values, self._gang)

    def _backward_values(
        self, critic: CriticModel, chunk: Chunk, references: Tensor | None, sums: Tensor
    ) -> Tensor:
        """Adds the critic's gradient, and its ``value_sums`` to ``sums``; returns the policy's advantages ``[N]``."""
        values = critic.values(chunk.rows)
        advantages, returns = critic_advantages(
            self._loss,
            chunk.rewards,
            values.detach(),
            chunk.lengths,
            max(chunk.sizes),
            chunk.engine_logprobs,
            references,
        )
        loss = value_loss(values, returns).sum()
        if chunk.idle:
            torch.autograd.backward(0.0 * loss)
            return advantages
        torch.autograd.backward(loss)
        sums += value_sums(values, returns)
        return advantages

    def _backward_held(self) -> None:
        """Adds the gradient of all samples that were held until the step was complete."""
        samples, self._position.held = self._position.held, []
        references = self._reference_logprobs_of(samples) if self._loss.penalises_rewards else None
        arrived = [float(row.advantage) for row in self._check_samples(samples)]
        tokens = step_advantages(self._loss, self._setup.credit, samples, arrived, references)
        advantages = tokens.numpy().astype(np.float32)
        ends = np.cumsum([len(sample.tokens) for sample in samples])[:-1]
        totals = StepTotals()
        self._backward(list(map(TrainedSample, samples, np.split(advantages, ends))), totals)
        if references is not None:
            totals.sums["kl"] = step_kl(samples, references)
        self._position.totals.add(totals)

    def optimizer_step(self, run_step: int | None = None) -> StepStats:
        """See ``PolicyBackend.optimizer_step``: divide by the step's count, clip, AdamW, schedule."""
        if self._position.held:
            with self._named_shortage():
                self._backward_held()
        totals = self._position.totals
        divisor = denominator(
            self._loss.aggregation,
            tokens=totals.tokens,
            sequences=totals.samples,
            constant=self._loss.constant_length,
        )
        position = self._position.version if run_step is None else run_step
        lr = learning_rate(self._setup.optimizer, position, self._total_steps)
        grad_norm = gradient_norm(self.models.parameters, divisor, self._gang)
        skipped = self._update(totals, divisor, grad_norm, lr, position)
        self._check_deviation(totals)
        self._position.step(self._setup.credit)
        figures = totals.figures(divisor)
        figures |= {"grad_norm": grad_norm, "lr": lr, "skipped_updates": int(skipped)}
        figures["unsure_tokens"] = round(totals.sums.get("unsure_tokens", 0.0))
        if self._critic is not None:
            figures["value_loss"] = totals.value_loss
            if (explained := explained_variance(totals.tokens, totals.values)) is not None:
                figures["explained_variance"] = explained
        finite = {name: value if math.isfinite(value) else 0.0 for name, value in figures.items()}
        return StepStats(totals.samples, totals.tokens, finite, totals.agent_shares(self._setup.credit))

    def _update(self, totals: StepTotals, divisor: int, grad_norm: float, lr: float, position: int) -> bool:
        """Steps policy and critic, and zeroes their gradients; True if the policy's weights stay as they are.

        Raises NonFiniteGradient before anything is touched, unless the step is skipped.
        """
        critic, tokens = self._critic, max(1, totals.tokens)
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

    def _chunks(self, samples: Sequence[TrainedSample]) -> Chunks:
        """The forwards of the samples that have a gradient."""
        every = self._loss.kl_in_loss or self._critic is not None
        trained = [row for row in samples if every or row.has_signal]
        return self._make_chunks(trained)

    def _make_chunks(self, samples: Sequence[TrainedSample]) -> Chunks:
        most_tokens = self._setup.torch_trainer.tokens_per_forward
        rounding = ROUNDING[self._setup.real_model.dtype]
        return make_chunks(
            samples,
            self._vocab_size,
            self._device,
            self._gang,
            most_tokens,
            rounding,
            packed=self.models.packs,
        )

    @property
    def _needs_references(self) -> bool:
        """True if each forward needs the reference: for a KL in the loss, or in the rewards of a critic."""
        return self._loss.kl_coefficient > 0 and (self._loss.kl_in_loss or self._critic is not None)

    def _reference_logprobs(self, chunk: Chunk) -> Tensor:
        """The reference policy's log-probabilities ``[N]`` of the completion tokens, without gradient."""
        assert self._reference is not None, "it is built if there is a kl_coefficient"
        with torch.no_grad():
            return self._reference.logprobs(chunk.rows, chunk.temperatures, chunk.truncations)

    def _reference_logprobs_of(self, samples: Sequence[Sample]) -> list[Tensor]:
        """The same, sample by sample, on the CPU."""
        lengths = [len(sample.tokens) for sample in samples]
        logprobs_of = list(torch.split(torch.zeros(sum(lengths), device=self._device), lengths))
        for chunk in self._make_chunks([TrainedSample(sample, 0.0) for sample in samples]):
            logprobs = self._reference_logprobs(chunk)
            for index, of_sample in zip(chunk.indices, torch.split(logprobs, chunk.sizes), strict=False):
                logprobs_of[index] = of_sample
        every = self._gang.sum(torch.cat(logprobs_of))
        return list(torch.split(every.cpu(), lengths))

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

    def weights(self) -> dict[str, Tensor]:
        return self.models.published()

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self.models.save(folder, tokenizer, self._position.version, self._position.baselines.means)

    def load(self, folder: Path) -> None:
        """See ``PolicyBackend.load``. A SFT under way ends."""
        self._position = PolicyPosition.loaded(*self.models.load(folder))
