"""One policy on one rank with torch and a Hugging Face causal language model.

The gradient of a step is a sum over its completion tokens, accumulated in ``p.grad`` over however many
micro-batches, in whatever order they come; `TorchPolicy.optimizer_step` divides it once by the step's count of tokens
or sequences. That makes training while other rollouts still run the same computation as training after a barrier.

An algorithm that does not stream needs the whole step for its first gradient: its samples are held until then.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ....core.errors import CheckpointMismatch, NonFiniteGradient, StaleSample
from ....core.files import read_json, write_json
from ....core.telemetry import get_logger
from ....transport.state_dict import without_ties
from ...messages import ModelConfig, Sample
from ..batch import PaddedRows, TokenRow, pad_rows
from ..config import AlgorithmConfig, OptimizerConfig, WarmUpConfig
from ..loss import denominator
from ..objective import CompletionTokens, batch_loss, sample_advantage, step_advantages
from ..state_files import check_tensors, read_tensors_into, write_tensors
from .base import MicroBatchStats, StepStats
from .chunks import Chunk, TrainedSample, make_chunks
from .completion_model import CompletionModel, derived_seed, random_stream

log = get_logger(__name__)

WEIGHTS_FILE = "model.safetensors"  # the name transformers looks for
STATE_FILE = "training_state.safetensors"
REFERENCE_FILE = "reference.safetensors"
POSITION_FILE = "training_state.json"
FORMAT = 1
_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step ``step`` (0-based) of ``total_steps``; a pure function of them.

    During warm-up ``lr * (step + 1) / (warmup_steps + 1)``, so that the first step is not wasted on a rate
    of 0. Then ``lr``, or for ``linear`` ``lr * (total_steps - step) / (total_steps - warmup_steps)``, which
    is 0 from ``total_steps`` on.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    return config.lr * max(0, total_steps - step) / max(1, total_steps - config.warmup_steps)


@dataclass(slots=True)
class _StepTotals:
    """Sums over the micro-batches of the step under way."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    deviation: float = 0.0

    def add(self, other: "_StepTotals") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def clip_fraction(self) -> float:
        return self.clipped / max(1, self.trained_tokens)

    @property
    def ratio_deviation(self) -> float:
        return self.deviation / max(1, self.trained_tokens)


class TorchPolicy:
    """A `PolicyBackend` on one device. ``model`` is the live module, its parameters the master weights."""

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        algorithm: AlgorithmConfig,
        warm_up: WarmUpConfig,
        *,
        seed: int,
        total_steps: int,
        temperature: float,
        device: torch.device | str = "cpu",
        max_staleness: int = 0,
    ) -> None:
        """``seed`` is the run's: the policy's own derives from it and ``name``. ``temperature`` is the one
        the policy's samples are drawn at; raises ``ValueError`` unless it is positive, for greedy decoding
        has no log-probabilities to train on. ``max_staleness``: versions that a sample may be behind."""
        if temperature <= 0:
            raise ValueError(f"policy {name}: can't train on samples drawn at temperature {temperature}")
        self.name = name
        self._optimizer_config, self._algorithm, self._warm_up = optimizer, algorithm, warm_up
        self._total_steps, self._temperature = total_steps, temperature
        self._max_staleness = max_staleness
        self._device = torch.device(device)
        self._autocast = model.dtype == "bfloat16"
        own_seed = derived_seed(seed, name)
        self._completions = CompletionModel(model, own_seed, self._device)
        self.model = self._completions.model
        self._vocab_size = self._completions.vocab_size
        self._reference = CompletionModel(model, own_seed, self._device) if algorithm.kl_coefficient else None
        if self._reference is not None:
            self._reference.model.eval().requires_grad_(False)
        self._optimizer = self._make_optimizer()
        self._rng_state = random_stream(own_seed)
        self._version = 0
        self._totals = _StepTotals()
        self._held: list[Sample] = []
        self._warm_up_batches, self._warm_up_loss = 0, math.nan

    @property
    def version(self) -> int:
        """Optimizer steps taken; the schedule's position too."""
        return self._version

    # ----------------------------------------------------------------------- warm-up

    def warm_up(self, examples: Sequence[TokenRow]) -> float:
        """See `PolicyBackend.warm_up`: mean cross entropy per completion token, one AdamW step."""
        if self._version or self._totals.samples:
            raise RuntimeError(f"policy {self.name}: warm-up after reinforcement learning has begun")
        with self._own_randomness():
            rows = pad_rows(examples, self._vocab_size).to(self._device)
            loss = -self._completions.logprobs(rows, 1.0).mean()
            torch.autograd.backward(loss)
        self._apply_gradient(1, self._warm_up.lr)
        self._warm_up_batches += 1
        self._warm_up_loss = loss.item()
        return self._warm_up_loss

    def warm_up_done(self) -> None:
        """See `PolicyBackend.warm_up_done`. Does nothing without a warm-up."""
        if not self._warm_up_batches:
            return
        log.info("warmed up", policy=self.name, batches=self._warm_up_batches, loss=self._warm_up_loss)
        # Zeroed moments and step counters are what a new AdamW has, without a second copy in memory.
        for state in self._optimizer.state.values():
            for moment in state.values():
                moment.zero_()
        if self._reference is not None:  # what reinforcement learning starts from
            self._reference.model.load_state_dict(self.model.state_dict())
        self._warm_up_batches = 0

    # ----------------------------------------------------------------------- reinforcement learning

    def accumulate(self, batch: Sequence[Sample]) -> MicroBatchStats:
        """See `PolicyBackend.accumulate`.

        A sample whose advantage is exactly 0 has no gradient, unless a KL is in the loss: its tokens count, the model
        never sees it.
        """
        started = perf_counter()
        if self._warm_up_batches:
            raise RuntimeError(f"policy {self.name}: call warm_up_done() before reinforcement learning")
        checked = self._checked(batch)
        totals = _StepTotals(len(batch), sum(len(sample.tokens) for sample in batch))
        if self._algorithm.streams:
            self._backward(self._chunks(checked), totals)
        else:
            pad_rows([(sample.prompt_tokens, sample.tokens) for sample in batch], self._vocab_size)
            self._held += batch
        self._totals.add(totals)
        return MicroBatchStats(
            samples=totals.samples,
            tokens=totals.tokens,
            trained_samples=sum(row.has_signal for row in checked),
            seconds=perf_counter() - started,
        )

    def _backward(self, chunks: Sequence[Chunk], totals: _StepTotals) -> None:
        """Adds the gradient of ``chunks``, and what it shows to ``totals``."""
        sums = torch.zeros(3, device=self._device)
        with self._own_randomness():
            for chunk in chunks:
                logprobs = self._completions.logprobs(chunk.rows, self._temperature)
                tokens = CompletionTokens(
                    logprobs,
                    chunk.engine_logprobs,
                    chunk.advantages,
                    chunk.lengths,
                    self._reference_logprobs(chunk.rows) if self._algorithm.kl_in_loss else None,
                )
                loss, diagnostics = batch_loss(self._algorithm, tokens)
                torch.autograd.backward(loss)
                sums += diagnostics
                totals.trained_tokens += len(chunk.advantages)
        totals.loss, totals.clipped, totals.deviation = sums.tolist()

    def _backward_held(self) -> None:
        """The gradient of all samples that waited for the step to be whole."""
        samples, self._held = self._held, []
        references = None
        if self._algorithm.kl_coefficient and self._algorithm.kl_in_reward:
            references = self._reference_logprobs_of(samples)
        advantages = step_advantages(self._algorithm, samples, references).numpy().astype(np.float32)
        ends = np.cumsum([len(sample.tokens) for sample in samples])[:-1]
        totals = _StepTotals()
        self._backward(self._chunks(list(map(TrainedSample, samples, np.split(advantages, ends)))), totals)
        self._totals.add(totals)

    def optimizer_step(self) -> StepStats:
        """See `PolicyBackend.optimizer_step`: divide by the step's count, clip, AdamW, schedule."""
        if self._held:
            self._backward_held()
        totals = self._totals
        divisor = denominator(
            self._algorithm.aggregation,
            tokens=totals.tokens,
            sequences=totals.samples,
            constant=self._algorithm.constant_length,
        )
        lr = learning_rate(self._optimizer_config, self._version, self._total_steps)
        grad_norm = self._apply_gradient(divisor, lr)
        self._version += 1
        self._totals = _StepTotals()
        return StepStats(
            samples=totals.samples,
            tokens=totals.tokens,
            loss=totals.loss / divisor,
            grad_norm=grad_norm,
            clip_fraction=totals.clip_fraction,
            ratio_deviation=totals.ratio_deviation,
            lr=lr,
        )

    def _checked(self, batch: Sequence[Sample]) -> list[TrainedSample]:
        """Every sample with its advantage, as far as its group tells. Raises what `accumulate` raises."""
        checked = []
        for sample in batch:
            if not 0 <= self._version - sample.policy_version <= self._max_staleness:
                raise StaleSample(sample.sample_id, sample.policy_version, self.name, self._version)
            if not len(sample.tokens) == len(sample.logprobs) > 0:
                counts = f"{len(sample.tokens)} tokens, {len(sample.logprobs)} log-probabilities"
                raise ValueError(
                    f"sample {sample.sample_id}: {counts}; need as many of each, and one at least"
                )
            checked.append(TrainedSample(sample, sample_advantage(self._algorithm, sample)))
        return checked

    def _chunks(self, samples: Sequence[TrainedSample]) -> list[Chunk]:
        """The forwards of those that have a gradient."""
        every = self._algorithm.kl_in_loss
        trained = [row for row in samples if every or row.has_signal]
        return make_chunks(trained, self._vocab_size, self._device)

    def _reference_logprobs(self, rows: PaddedRows) -> Tensor:
        """The reference policy's log-probabilities ``[N]`` of the completion tokens, without gradient."""
        assert self._reference is not None, "it is built wherever there is a kl_coefficient"
        with torch.no_grad():
            return self._reference.logprobs(rows, self._temperature)

    def _reference_logprobs_of(self, samples: Sequence[Sample]) -> list[Tensor]:
        """The same, sample by sample, on the CPU."""
        found: dict[int, Tensor] = {}
        for chunk in make_chunks([TrainedSample(s, 0.0) for s in samples], self._vocab_size, self._device):
            logprobs = self._reference_logprobs(chunk.rows).cpu()
            found |= zip(chunk.indices, torch.split(logprobs, chunk.lengths.tolist()), strict=True)
        return [found[index] for index in range(len(samples))]

    # ----------------------------------------------------------------------- the optimizer

    def _make_optimizer(self) -> torch.optim.AdamW:
        """AdamW with gradients and moments allocated now, once, and never again."""
        config = self._optimizer_config
        optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=self._device.type in ("cpu", "cuda"),
        )
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return optimizer

    def _apply_gradient(self, divisor: int, lr: float) -> float:
        """Divides the accumulated gradient by ``divisor``, clips, steps, zeroes; the norm before clipping."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        grad_norm = float(nn.utils.get_total_norm(gradients)) / divisor
        if not math.isfinite(grad_norm):
            raise NonFiniteGradient(self.name, self._version, grad_norm)
        # Dividing and clipping are one factor, so one pass over the gradient.
        clip = min(1.0, self._optimizer_config.max_grad_norm / (grad_norm + _CLIP_EPSILON))
        for gradient in gradients:
            gradient.mul_(clip / divisor)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        return grad_norm

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Runs the block on this policy's random stream (dropout), and puts torch's global one back.

        The stream is part of the saved state, so a resumed run draws what an uninterrupted one would,
        whichever other policies share the process. A GPU's generator is seeded from it, block by block.
        """
        on_gpu = self._device.type == "cuda"
        with torch.random.fork_rng(devices=[self._device] if on_gpu else []):
            torch.set_rng_state(self._rng_state)
            if on_gpu:
                with torch.cuda.device(self._device):
                    torch.cuda.manual_seed(int(torch.randint(2**62, ())))
            try:
                yield
            finally:
                self._rng_state.copy_(torch.get_rng_state())

    # ----------------------------------------------------------------------- weights and files

    def weights(self) -> dict[str, Tensor]:
        """See `PolicyBackend.weights`: state-dict tensors, detached, in the precision the model computes in.

        float32 ones are the live weights themselves, bfloat16 ones are copies.
        """
        if not self._autocast:
            return self._master_weights()
        dtype = torch.bfloat16
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in self._master_weights().items()}

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """See `PolicyBackend.save`. ``folder`` is created; the weights are written in float32."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.config.save_pretrained(folder)
        self.model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_tensors(folder / WEIGHTS_FILE, self._master_weights())
        write_tensors(folder / STATE_FILE, self._training_state())
        if self._reference is not None:
            write_tensors(folder / REFERENCE_FILE, _named_weights(self._reference.model))
        write_json(folder / POSITION_FILE, {"format": FORMAT, "version": self._version})

    def load(self, folder: Path) -> None:
        """See `PolicyBackend.load`. A warm-up under way ends."""
        position = read_json(folder / POSITION_FILE)
        if position.get("format") != FORMAT:
            found = str(position.get("format"))
            raise CheckpointMismatch(folder / POSITION_FILE, "format", str(FORMAT), found)
        version = position.get("version")
        if type(version) is not int or version < 0:
            raise CheckpointMismatch(folder / POSITION_FILE, "version", "a count", repr(version))
        files: dict[str, Mapping[str, Tensor]] = {
            WEIGHTS_FILE: self._master_weights(),
            STATE_FILE: self._training_state(),
        }
        if self._reference is not None:
            files[REFERENCE_FILE] = _named_weights(self._reference.model)
        for name, tensors in files.items():
            check_tensors(folder / name, tensors)
        for name, tensors in files.items():
            read_tensors_into(folder / name, tensors)
        self._version = version
        self._totals = _StepTotals()
        self._held = []
        self._warm_up_batches = 0
        self._optimizer.zero_grad(set_to_none=False)

    def _master_weights(self) -> dict[str, Tensor]:
        return _named_weights(self.model)

    def _training_state(self) -> dict[str, Tensor]:
        """The live tensors that a bit-equal continuation needs besides the weights."""
        state = {"rng": self._rng_state}
        for name, parameter in self.model.named_parameters():
            for moment, tensor in self._optimizer.state[parameter].items():
                state[f"{moment}.{name}"] = tensor
        return state


def _named_weights(model: nn.Module) -> dict[str, Tensor]:
    """The live state-dict tensors by name, those shared by several names (tied weights) once."""
    return {name: tensor.detach() for name, tensor in without_ties(model.state_dict(keep_vars=True)).items()}
