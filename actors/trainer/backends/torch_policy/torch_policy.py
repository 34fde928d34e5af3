"""One policy on one rank with torch and a Hugging Face causal language model.

The gradient of a step is a sum over its completion tokens, accumulated in ``p.grad`` over any number of micro-batches
in any order, of any of the policy's agents; ``TorchPolicy.optimizer_step`` divides it once by the step's count of
tokens or sequences. So training while other rollouts still run is the same computation as training after a barrier,
and the gradient of several agents' samples is that of one batch of all of them.

An algorithm that does not stream needs the whole step for its first gradient: its samples are held until then. PPO
streams: its critic steps when the policy does, so within a step a sample's values need that sample alone.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .....core.telemetry import get_logger
from ....errors import CheckpointMismatch, NonFiniteGradient, StaleSample
from ....json_files import read_json, write_json
from ....messages import Sample
from ....names import AgentName, PolicyName
from ...critic import explained_variance, value_loss, value_sums
from ...loss import denominator
from ...objective import CompletionTokens, batch_loss, critic_advantages, sample_advantage, step_advantages
from ...padding import TokenRow, pad_rows
from ...policy_files import check_tensors, read_tensors_into, write_tensors
from ...saved_policy import CRITIC_FILE, POSITION_FILE, REFERENCE_FILE, STATE_FILE, WEIGHTS_FILE
from ...trainer_setup import PolicySetup
from ..policy_backend import MicroBatchStats, StepStats
from .adamw import (
    apply_gradient,
    drop_gradient,
    forget_moments,
    gradient_norm,
    learning_rate,
    make_adamw,
    moments,
)
from .completion_model import CompletionModel, derived_seed, dropout_settings, named_weights
from .critic_model import CriticModel
from .forward_batches import Chunk, TrainedSample, make_chunks
from .step_totals import StepTotals

log = get_logger(__name__)

FORMAT = 1


def _finite(number: float) -> float:
    """``number``, or 0 if it is infinite or not a number: of a step whose update is left out."""
    return number if math.isfinite(number) else 0.0


class TorchPolicy:
    """A ``PolicyBackend`` on one device. ``model`` is the live module, its parameters the master weights."""

    def __init__(self, name: PolicyName, setup: PolicySetup, *, seed: int, total_steps: int) -> None:
        """``seed`` is the run's: the policy's own derives from it and ``name``. ``total_steps``: of the run."""
        self.name = name
        self._setup, self._loss = setup, setup.loss
        self._total_steps = total_steps
        model, loss = setup.real_model, setup.loss
        self._device = torch.device(model.device)
        self._autocast = model.dtype == "bfloat16"
        own_seed = derived_seed(seed, name)
        self._completions = CompletionModel(model, own_seed)
        self.model = self._completions.model
        self._vocab_size = self._completions.vocab_size
        self._reference = CompletionModel(model, own_seed) if loss.kl_coefficient else None
        if self._reference is not None:
            self._reference.model.requires_grad_(False)
        self._critic = CriticModel(self._completions, loss.critic, setup.optimizer) if loss.critic else None
        self._optimizer = make_adamw(self.model, setup.optimizer)
        if dropouts := dropout_settings(self.model):
            log.info("dropout of the model's config is not used, as in the engine", policy=name, **dropouts)
        self._version = 0
        self._totals = StepTotals()
        self._held: list[Sample] = []
        self._sft_batches, self._sft_loss = 0, math.nan
        self._deviating_steps = self._non_finite_steps = 0

    @property
    def version(self) -> int:
        """Optimizer steps taken; the schedule's position too."""
        return self._version

    # ----------------------------------------------------------------------- SFT

    def sft(self, examples: Sequence[TokenRow]) -> float:
        """See ``PolicyBackend.sft``: mean cross entropy per completion token, one AdamW step."""
        if self._version or self._totals.samples:
            raise RuntimeError(f"policy {self.name}: SFT after reinforcement learning has begun")
        rows = pad_rows(examples, self._vocab_size).to(self._device)
        loss = -self._completions.logprobs(rows).mean()
        torch.autograd.backward(loss)
        norm = gradient_norm(self.model, 1)
        if not math.isfinite(norm):
            raise NonFiniteGradient(self.name, self._version, norm)
        self._apply_gradient(1, norm, self._setup.sft.lr)
        self._sft_batches += 1
        self._sft_loss = loss.item()
        return self._sft_loss

    def sft_done(self) -> None:
        """See ``PolicyBackend.sft_done``. Does nothing without a SFT."""
        if not self._sft_batches:
            return
        log.info("warmed up", policy=self.name, batches=self._sft_batches, loss=self._sft_loss)
        forget_moments(self._optimizer)
        self._start_from_here()
        self._sft_batches = 0

    def start_from(self, folder: Path) -> None:
        """See ``PolicyBackend.start_from``."""
        weights = self._master_weights()
        check_tensors(folder / WEIGHTS_FILE, weights)
        read_tensors_into(folder / WEIGHTS_FILE, weights)
        self._start_from_here()

    def _start_from_here(self) -> None:
        """Reinforcement learning starts from the present weights: so do reference and critic."""
        if self._reference is not None:
            self._reference.model.load_state_dict(self.model.state_dict())
        if self._critic is not None:
            self._critic.start_from(self._completions)

    # ----------------------------------------------------------------------- reinforcement learning

    def accumulate(self, batch: Sequence[Sample]) -> MicroBatchStats:
        """See ``PolicyBackend.accumulate``.

        A sample whose advantage is exactly 0 has no gradient, unless a KL is in the loss or a critic learns from it:
        its tokens count, the model never sees it.
        """
        started = perf_counter()
        if self._sft_batches:
            raise RuntimeError(f"policy {self.name}: call sft_done() before reinforcement learning")
        checked = self._checked(batch)
        totals = StepTotals(len(batch), sum(len(sample.tokens) for sample in batch))
        totals.stale = sum(sample.policy_version < self._version for sample in batch)
        if self._loss.streams:
            self._backward(self._chunks(checked), totals)
        else:
            pad_rows([(sample.prompt_tokens, sample.tokens) for sample in batch], self._vocab_size)
            self._held += batch
        self._totals.add(totals)
        return MicroBatchStats(
            samples=totals.samples,
            tokens=totals.tokens,
            trained_samples=len(batch) if self._critic else sum(row.has_signal for row in checked),
            seconds=perf_counter() - started,
        )

    def _backward(self, chunks: Sequence[Chunk], totals: StepTotals) -> None:
        """Adds the gradient of ``chunks``, and their sums to ``totals``."""
        sums = torch.zeros(3, device=self._device)
        for chunk in chunks:
            references = self._reference_logprobs(chunk) if self._needs_references else None
            advantages = chunk.advantages
            if self._critic is not None:
                advantages = self._backward_values(self._critic, chunk, references, totals)
            logprobs = self._completions.logprobs(chunk.rows, chunk.temperatures)
            tokens = CompletionTokens(logprobs, chunk.engine_logprobs, advantages, chunk.lengths, references)
            loss, diagnostics = batch_loss(self._loss, tokens)
            torch.autograd.backward(loss)
            sums += diagnostics
            totals.trained_tokens += len(chunk.advantages)
        totals.loss, totals.clipped, totals.deviation = sums.tolist()

    def _backward_values(
        self, critic: CriticModel, chunk: Chunk, references: Tensor | None, totals: StepTotals
    ) -> Tensor:
        """Adds the critic's gradient; returns the policy's advantages ``[N]``."""
        values = critic.values(chunk.rows)
        advantages, returns = critic_advantages(
            self._loss, chunk.rewards, values.detach(), chunk.lengths, chunk.engine_logprobs, references
        )
        torch.autograd.backward(value_loss(values, returns).sum())
        totals.values += value_sums(values, returns).cpu()
        return advantages

    def _backward_held(self) -> None:
        """Adds the gradient of all samples that were held until the step was complete."""
        samples, self._held = self._held, []
        references = None
        if self._loss.penalises_rewards:
            references = self._reference_logprobs_of(samples)
        advantages = (
            step_advantages(self._loss, self._setup.credit, samples, references).numpy().astype(np.float32)
        )
        ends = np.cumsum([len(sample.tokens) for sample in samples])[:-1]
        totals = StepTotals()
        self._backward(self._chunks(list(map(TrainedSample, samples, np.split(advantages, ends)))), totals)
        self._totals.add(totals)

    def optimizer_step(self, run_step: int | None = None) -> StepStats:
        """See ``PolicyBackend.optimizer_step``: divide by the step's count, clip, AdamW, schedule."""
        if self._held:
            self._backward_held()
        totals = self._totals
        divisor = denominator(
            self._loss.aggregation,
            tokens=totals.tokens,
            sequences=totals.samples,
            constant=self._loss.constant_length,
        )
        position = self._version if run_step is None else run_step
        lr = learning_rate(self._setup.optimizer, position, self._total_steps)
        grad_norm = gradient_norm(self.model, divisor)
        skipped = self._update(totals, divisor, grad_norm, lr, position)
        self._check_deviation(totals)
        self._version += 1
        self._totals = StepTotals()
        return StepStats(
            samples=totals.samples,
            tokens=totals.tokens,
            loss=_finite(totals.loss / divisor),
            grad_norm=_finite(grad_norm),
            clip_fraction=totals.clip_fraction,
            ratio_deviation=_finite(totals.ratio_deviation),
            lr=lr,
            skipped_update=skipped,
            value_loss=_finite(totals.value_loss) if self._critic else None,
            explained_variance=explained_variance(totals.tokens, totals.values) if self._critic else None,
        )

    def _update(self, totals: StepTotals, divisor: int, grad_norm: float, lr: float, position: int) -> bool:
        """Steps policy and critic, and zeroes their gradients; True if the policy's weights stay as they are.

        Raises NonFiniteGradient before anything is touched, unless the step is skipped.
        """
        critic, tokens = self._critic, max(1, totals.tokens)
        critic_norm = critic.gradient_norm(tokens) if critic else 0.0
        if not (math.isfinite(grad_norm) and math.isfinite(critic_norm)):
            self._skip_non_finite(critic_norm if math.isfinite(grad_norm) else grad_norm)
            return True
        self._non_finite_steps = 0
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
        if config.non_finite_gradient == "end" or self._non_finite_steps >= config.max_non_finite_steps:
            raise NonFiniteGradient(self.name, self._version, norm)
        self._non_finite_steps += 1
        log.warning(
            "the gradient is not finite: the update is left out",
            policy=self.name,
            version=self._version,
            in_a_row=self._non_finite_steps,
            max_non_finite_steps=config.max_non_finite_steps,
        )
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        drop_gradient(self._optimizer)
        if self._critic is not None:
            self._critic.drop_gradient()

    def _check_deviation(self, totals: StepTotals) -> None:
        """Logs a warning if trainer and engine disagree on samples of one and the same version: in the 1st, 2nd, 4th,
        8th ... such step."""
        bound = self._loss.deviation_bound(self._setup.real_model.dtype)
        if totals.stale or totals.ratio_deviation <= bound:
            return
        self._deviating_steps += 1
        if self._deviating_steps & (self._deviating_steps - 1) == 0:
            log.warning(
                "trainer and engine disagree on the probabilities of tokens",
                policy=self.name,
                ratio_deviation=totals.ratio_deviation,
                bound=bound,
                bound_is=f"policies.{self.name}.algorithm.ratio_deviation_warning",
                steps=self._deviating_steps,
                likely_causes="randomness in the model's forward, an engine with other weights or another "
                "temperature, an engine that changes its probabilities (top-p, penalties), a lower precision",
            )

    def _checked(self, batch: Sequence[Sample]) -> list[TrainedSample]:
        """Every sample with its advantage from its group's rewards. Raises as ``accumulate`` does."""
        checked = []
        for sample in batch:
            if not 0 <= self._version - sample.policy_version <= self._setup.max_staleness:
                raise StaleSample(sample.sample_id, sample.policy_version, self.name, self._version)
            if not len(sample.tokens) == len(sample.logprobs) > 0:
                counts = f"{len(sample.tokens)} tokens, {len(sample.logprobs)} log-probabilities"
                raise ValueError(
                    f"sample {sample.sample_id}: {counts}; need as many of each, and one at least"
                )
            if not sample.temperature > 0:
                raise ValueError(
                    f"sample {sample.sample_id}: drawn at temperature {sample.temperature}, which has no "
                    "log-probabilities to train on"
                )
            credit = self._setup.credit.get(AgentName(sample.agent))
            if credit is None:
                users = ", ".join(self._setup.credit)
                raise ValueError(
                    f"sample {sample.sample_id}: agent {sample.agent} does not use policy {self.name}; {users} do"
                )
            checked.append(TrainedSample(sample, sample_advantage(credit, sample)))
        return checked

    def _chunks(self, samples: Sequence[TrainedSample]) -> list[Chunk]:
        """The forwards of the samples that have a gradient."""
        every = self._loss.kl_in_loss or self._critic is not None
        trained = [row for row in samples if every or row.has_signal]
        return make_chunks(trained, self._vocab_size, self._device)

    @property
    def _needs_references(self) -> bool:
        """True if each forward needs the reference: for a KL in the loss, or in the rewards of a critic."""
        return self._loss.kl_coefficient > 0 and (self._loss.kl_in_loss or self._critic is not None)

    def _reference_logprobs(self, chunk: Chunk) -> Tensor:
        """The reference policy's log-probabilities ``[N]`` of the completion tokens, without gradient."""
        assert self._reference is not None, "it is built if there is a kl_coefficient"
        with torch.no_grad():
            return self._reference.logprobs(chunk.rows, chunk.temperatures)

    def _reference_logprobs_of(self, samples: Sequence[Sample]) -> list[Tensor]:
        """The same, sample by sample, on the CPU."""
        found: dict[int, Tensor] = {}
        for chunk in make_chunks([TrainedSample(s, 0.0) for s in samples], self._vocab_size, self._device):
            logprobs = self._reference_logprobs(chunk).cpu()
            found |= zip(chunk.indices, torch.split(logprobs, chunk.lengths.tolist()), strict=True)
        return [found[index] for index in range(len(samples))]

    # ----------------------------------------------------------------------- the optimizer

    def _apply_gradient(self, divisor: int, norm: float, lr: float) -> None:
        apply_gradient(
            self.model,
            self._optimizer,
            divisor=divisor,
            norm=norm,
            max_norm=self._setup.optimizer.max_grad_norm,
            lr=lr,
        )

    # ----------------------------------------------------------------------- weights and files

    def weights(self) -> dict[str, Tensor]:
        """See ``PolicyBackend.weights``: state-dict tensors, detached, in the precision the model computes in.

        float32 ones are the live weights themselves, bfloat16 ones are copies.
        """
        if not self._autocast:
            return self._master_weights()
        dtype = torch.bfloat16
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in self._master_weights().items()}

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """See ``PolicyBackend.save``. ``folder`` is created; the weights are written in float32."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.config.save_pretrained(folder)
        self.model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for name, tensors in self._files().items():
            write_tensors(folder / name, tensors)
        write_json(folder / POSITION_FILE, {"format": FORMAT, "version": self._version})

    def load(self, folder: Path) -> None:
        """See ``PolicyBackend.load``. A SFT under way ends."""
        position = read_json(folder / POSITION_FILE)
        if position.get("format") != FORMAT:
            found = str(position.get("format"))
            raise CheckpointMismatch(folder / POSITION_FILE, "format", str(FORMAT), found)
        version = position.get("version")
        if type(version) is not int or version < 0:
            raise CheckpointMismatch(folder / POSITION_FILE, "version", "a count", repr(version))
        files = self._files()
        for name, tensors in files.items():
            check_tensors(folder / name, tensors)
        for name, tensors in files.items():
            read_tensors_into(folder / name, tensors)
        self._version = version
        self._totals = StepTotals()
        self._held = []
        self._sft_batches = 0
        self._drop_gradients()

    def _master_weights(self) -> dict[str, Tensor]:
        return named_weights(self.model)

    def _files(self) -> dict[str, Mapping[str, Tensor]]:
        """The live tensors of a saved policy, by the file that they are in."""
        files: dict[str, Mapping[str, Tensor]] = {
            WEIGHTS_FILE: self._master_weights(),
            STATE_FILE: moments(self.model, self._optimizer),  # all that a bit-equal continuation needs
        }
        if self._reference is not None:
            files[REFERENCE_FILE] = named_weights(self._reference.model)
        if self._critic is not None:
            files[CRITIC_FILE] = self._critic.state()
        return files
