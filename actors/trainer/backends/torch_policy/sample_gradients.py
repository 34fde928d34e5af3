"""The gradient of samples over a policy's models: the forwards and backwards of one rank, chunk by chunk.

All of a policy that does not depend on its position in the step: which samples are trained now, later or again is
decided in ``torch_policy.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ....compared_logprobs import Compared
from ....figures import Numbers
from ....messages import Sample
from ....names import AgentName
from ...objective.critic import value_loss, value_sums
from ...objective.objective import CompletionTokens, batch_loss, critic_advantages, idle_loss
from ...objective.users_loss import UsersLoss
from ...padding import TokenRow, pack_rows, pad_rows
from ...shards import divide
from ...trainer_setup import PolicySetup
from .compared_tokens import ComparedTokens
from .completion_model import CompletionModel
from .critic_model import CriticModel
from .forward_batches import IDLE_ROWS, ROUNDING, Chunk, Chunks, TrainedSample, make_chunks
from .role_gradients import RoleGradients
from .step_totals import StepTotals
from .trained_models import TrainedModels


class SampleGradients:
    """Adds gradients to those of ``models``, and their sums to totals. All ranks of the models' gang make the same
    calls."""

    def __init__(self, setup: PolicySetup, models: TrainedModels, users_loss: UsersLoss | None) -> None:
        """``users_loss``: of the ``setup``'s loss."""
        self._setup, self._loss, self._users_loss = setup, setup.loss, users_loss
        self._device = torch.device(setup.real_model.device)
        self._models, self._gang, self._sums = models, models.gang, models.replica_sums
        self._completions, self._reference, self._critic = models.completions, models.reference, models.critic
        self._vocab_size = models.completions.vocab_size
        self._compared = ComparedTokens(setup.compared_share)
        self._roles = RoleGradients(tuple(setup.credit), setup.torch_trainer.role_gradients_every)

    def backward_examples(self, examples: Sequence[TokenRow]) -> Tensor:
        """Adds the gradient of the mean cross entropy over all completion tokens; returns this rank's share of it."""
        for part in self._sums.of_micro_batch([examples], 1):
            loss = self._cross_entropy(part)
            torch.autograd.backward(loss)
        return loss.detach()

    def _cross_entropy(self, examples: Sequence[TokenRow]) -> Tensor:
        share = examples
        if self._gang.size > 1:
            self._completions.check(examples)
            lengths = np.array([len(prompt) + len(completion) for prompt, completion in examples], np.int64)
            share = [examples[index] for index in divide(lengths, self._gang.size)[self._gang.rank]]
        lay_out = pack_rows if self._models.packs else pad_rows
        rows = lay_out(share or IDLE_ROWS, self._vocab_size).with_tensors(lambda t: t.to(self._device))
        loss = -self._completions.logprobs(rows).sum() / sum(len(completion) for _, completion in examples)
        return loss if share else 0.0 * loss

    def trains(self, samples: Sequence[TrainedSample]) -> bool:
        """True if one of them has a gradient."""
        return any(map(self._has_gradient, samples))

    def backward(
        self, samples: Sequence[TrainedSample], totals: StepTotals, version: int, *, changed: bool = False
    ) -> None:
        """Adds the gradient of ``samples``, and their sums to ``totals``; of each agent apart in a step that measures
        it. ``version``: of the policy. ``changed``: the policy has, since the step's begin."""
        if changed or not self._roles.measures(version):
            self._backward_all(samples, totals, version, changed=changed)
            return
        for agent in self._setup.credit:
            rows = [row for row in samples if row.sample.agent == agent]
            if rows:
                with self._roles.of_agent(agent, len(rows), self._models.parameters):
                    of_agent = StepTotals()
                    self._backward_all(rows, of_agent, version)
                totals.add(of_agent)

    def _backward_all(
        self, samples: Sequence[TrainedSample], totals: StepTotals, version: int, *, changed: bool = False
    ) -> None:
        totals.note_agents(samples, self._critic is None)
        chunks = self.chunks(samples)
        names: tuple[str, ...] = ()
        zero = total = torch.zeros((), device=self._device)  # float32 also for a policy of float64
        values = torch.zeros(4, dtype=torch.float64, device=self._device)
        padding = merged = 0
        for chunk in self._sums.of_micro_batch(chunks, len(chunks)):
            tokens = self._tokens(chunk, values)
            if chunk.idle:
                loss, sums = idle_loss(self._loss, tokens)
            else:
                loss, sums = batch_loss(self._loss, tokens, self._users_loss)
            compared = chunk.old_logprobs is not None or not changed
            if not compared:  # the policy that is there is not the one that generated
                del sums["ratio_deviation"]
            unsure = None if chunk.truncations is None else chunk.truncations.unsure
            sums["unsure_tokens"] = zero if unsure is None else unsure.sum()
            if self._setup.real_model.router_replay:
                routes = chunk.rows.routes
                sums["replayed_share"] = zero if routes is None else routes.count(chunk.rows.positions)
            names = tuple(sums)  # also of an idle chunk: all ranks need the same
            torch.autograd.backward(loss)
            if chunk.idle:
                continue
            total = total + torch.stack([value.to(total.dtype) for value in sums.values()])
            totals.trained_tokens += len(chunk.advantages)
            totals.compared_tokens += len(chunk.advantages) * compared
            if compared:
                begin = tokens.logprobs if chunk.old_logprobs is None else chunk.old_logprobs
                self._compared.note(chunks.samples(chunk), begin, chunk.engine_logprobs)
            totals.positions += chunk.rows.input_ids.numel()
            totals.sample_tokens += chunk.tokens
            padding += chunk.rows.padding
            merged += chunk.merged
        if names:
            totals.sums |= {"padding_share": float(padding), "merged_share": float(merged)}
            totals.read(names, total.expand(len(names)), values, self._gang)
            self._compared.read(version)

    def _tokens(self, chunk: Chunk, values: Tensor) -> CompletionTokens:
        """The figures of the chunk's tokens, for its loss. ``values``: see ``_backward_values``."""
        references = self._reference_logprobs(chunk) if self._loss.needs_references else None
        advantages = chunk.advantages
        if self._critic is not None:
            advantages = self._backward_values(self._critic, chunk, references, values)
        logprobs, entropies = self._logprobs(chunk)
        return CompletionTokens(
            logprobs,
            chunk.engine_logprobs,
            advantages,
            chunk.lengths,
            chunk.group_sizes,
            chunk.rewards,
            references,
            chunk.old_logprobs,
            entropies,
            chunk.columns,
        )

    def take_compared(self) -> dict[str, Compared]:
        """The differences of samples since the last call, by their id: see ``ComparedTokens``."""
        return self._compared.take()

    def take_role_shares(self, samples: int) -> Mapping[AgentName, Numbers]:
        """Each agent's part of the gradient of a step of ``samples``: see ``RoleGradients``."""
        return self._roles.take_shares(samples)

    def forget_step(self) -> None:
        """Forgets what was measured of a step that is not continued here."""
        self._roles.forget()

    def _logprobs(self, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """The log-probabilities ``[N]`` with gradient, and the entropies if the loss has a bonus for them."""
        distributions = chunk.rows, chunk.temperatures, chunk.truncations
        if self._loss.entropy_coefficient > 0:
            return self._completions.logprobs_and_entropies(*distributions)
        return self._completions.logprobs(*distributions), None

    def _backward_values(
        self, critic: CriticModel, chunk: Chunk, references: Tensor | None, sums: Tensor
    ) -> Tensor:
        """Adds the critic's gradient, and its ``value_sums`` to ``sums``; returns the policy's advantages ``[N]``."""
        values = critic.values(chunk.rows)
        if chunk.idle:
            torch.autograd.backward(0.0 * values.sum())
            return chunk.advantages
        if chunk.returns is None:
            advantages, returns = self._critic_advantages(chunk, values.detach(), references)
        else:
            advantages, returns = chunk.advantages, chunk.returns
        torch.autograd.backward(value_loss(values, returns).sum())
        sums += value_sums(values, returns)
        return advantages

    def _critic_advantages(
        self, chunk: Chunk, values: Tensor, references: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return critic_advantages(
            self._loss,
            chunk.rewards,
            values,
            chunk.lengths,
            max(chunk.sizes),
            chunk.engine_logprobs,
            references,
        )

    # ----------------------------------------------------------------------- figures without gradient

    def at_begin(self, samples: Sequence[TrainedSample]) -> list[TrainedSample]:
        """Samples of later updates, with the figures of the policy as it is now, at the step's begin."""
        trained = [row for row in samples if self._has_gradient(row)]
        proximal, critic = self._loss.old_policy == "proximal", self._critic
        if not trained or not (proximal or critic):
            return list(samples)

        def forward(chunk: Chunk) -> Tensor:
            columns: list[Tensor] = []
            if proximal:
                columns.append(self._fixed_logprobs(self._completions, chunk))
            if critic is not None:
                references = self._reference_logprobs(chunk) if self._loss.needs_references else None
                columns += self._critic_advantages(chunk, critic.fixed_values(chunk.rows), references)
            return torch.stack([column.float() for column in columns], -1)

        rows = {}
        for row, figures in zip(trained, self._figures_of(trained, forward), strict=True):
            columns = list(figures.T.contiguous().numpy())
            old = columns.pop(0) if proximal else None
            advantage, returns = columns or (row.advantage, None)
            rows[row.sample.sample_id] = replace(row, advantage=advantage, old_logprobs=old, returns=returns)
        return [rows.get(row.sample.sample_id, row) for row in samples]

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """The reference policy's log-probabilities of the completion tokens, ``[T]`` of each sample, on the CPU."""
        return self._figures_of([TrainedSample(sample, 0.0) for sample in samples], self._reference_logprobs)

    def _reference_logprobs(self, chunk: Chunk) -> Tensor:
        """The same of a chunk, ``[N]`` on the device."""
        assert self._reference is not None, "it is built if there is a kl_coefficient"
        return self._fixed_logprobs(self._reference, chunk)

    def _fixed_logprobs(self, model: CompletionModel, chunk: Chunk) -> Tensor:
        """The same of any model."""
        return model.fixed_logprobs(chunk.rows, chunk.temperatures, chunk.truncations, self._gang)

    def _figures_of(
        self, samples: Sequence[TrainedSample], forward: Callable[[Chunk], Tensor]
    ) -> list[Tensor]:
        """Figures of the completion tokens, which ``forward`` computes without gradient, ``[N]`` or ``[N, K]`` float32:
        sample by sample, on the CPU of every rank."""
        lengths = [len(row.sample.tokens) for row in samples]
        figures_of: list[Tensor] = [torch.empty(0)] * len(samples)
        for chunk in self._make_chunks(samples):
            figures = forward(chunk)
            for index, of_sample in zip(chunk.indices, torch.split(figures, chunk.sizes), strict=False):
                figures_of[index] = of_sample
        for index, length in enumerate(lengths):
            if not len(figures_of[index]):  # of a sample that another rank has
                figures_of[index] = figures.new_zeros(length, *figures.shape[1:])
        every = self._gang.sum(torch.cat(figures_of))
        return list(torch.split(every.cpu(), lengths))

    # ----------------------------------------------------------------------- forwards

    def chunks(self, samples: Sequence[TrainedSample]) -> Chunks:
        """The forwards of the samples that have a gradient."""
        return self._make_chunks([row for row in samples if self._has_gradient(row)])

    def _has_gradient(self, row: TrainedSample) -> bool:
        return self._loss.trains_without_advantage or row.has_signal

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
            packed=self._models.packs,
        )
