"""One policy on one rank with torch and a Hugging Face causal language model.

The gradient of a step is a sum over its completion tokens, accumulated in ``p.grad`` over however many
micro-batches, in whatever order they come; `TorchPolicy.optimizer_step` divides it once by the step's token
count. That makes training while other rollouts still run the same computation as training after a barrier.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from ....core.errors import CheckpointMismatch, NonFiniteGradient, StaleSample
from ....core.files import read_json, write_json
from ....core.telemetry import get_logger
from ....transport.state_dict import without_ties
from ...messages import ModelConfig, Sample
from ..advantage import group_advantage
from ..batch import PaddedRows, TokenRow, pad_rows, split_by_length
from ..config import AlgorithmConfig, OptimizerConfig, WarmUpConfig
from ..loss import clipped_policy_loss, token_logprobs
from ..state_files import check_tensors, read_tensors_into, write_tensors
from .base import MicroBatchStats, StepStats
from .fused_norm import fuse_norms

log = get_logger(__name__)

WEIGHTS_FILE = "model.safetensors"  # the name transformers looks for
STATE_FILE = "training_state.safetensors"
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


def build_model(config: ModelConfig, seed: int) -> Any:
    """A Hugging Face causal language model with float32 master weights, in training mode, on the CPU.

    ``seed`` fixes the random weights of a model made from ``config.config``, whatever else was built before
    in this process, and torch's global generator is left as it was.
    """
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    auto_model: Any = AutoModelForCausalLM  # half of its methods have no types
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(_random_stream(seed))
        if config.path is not None:
            model = auto_model.from_pretrained(config.path, **options)
        else:
            model = auto_model.from_config(AutoConfig.for_model(**(config.config or {})), **options)
    model.config.architectures = [type(model).__name__]
    return model.train()


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
    ) -> None:
        """``seed`` is the run's: the policy's own derives from it and ``name``. ``temperature`` is the one
        the policy's samples are drawn at; raises ``ValueError`` unless it is positive, for greedy decoding
        has no log-probabilities to train on."""
        if temperature <= 0:
            raise ValueError(f"policy {name}: can't train on samples drawn at temperature {temperature}")
        self.name = name
        self._optimizer_config, self._algorithm, self._warm_up = optimizer, algorithm, warm_up
        self._total_steps, self._temperature = total_steps, temperature
        self._device = torch.device(device)
        self._autocast = model.dtype == "bfloat16"
        own_seed = _derived_seed(seed, name)
        self.model = fuse_norms(build_model(model, own_seed)).to(self._device)
        self._vocab_size = int(self.model.get_input_embeddings().num_embeddings)
        # The output layer and everything after it see the completion tokens only: [N, V], no padding.
        self._positions: Tensor | None = None
        self.model.get_output_embeddings().register_forward_pre_hook(self._keep_completions)
        self._optimizer = self._make_optimizer()
        self._rng_state = _random_stream(own_seed)
        self._version = 0
        self._totals = _StepTotals()
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
            loss = -self._logprobs(pad_rows(examples, self._vocab_size).to(self._device), 1.0).mean()
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
        self._warm_up_batches = 0

    # ----------------------------------------------------------------------- reinforcement learning

    def accumulate(self, batch: Sequence[Sample]) -> MicroBatchStats:
        """See `PolicyBackend.accumulate`.

        A sample whose advantage is exactly 0 has no gradient: its tokens count, the model never sees it.
        """
        started = perf_counter()
        if self._warm_up_batches:
            raise RuntimeError(f"policy {self.name}: call warm_up_done() before reinforcement learning")
        chunks = self._prepare(batch)
        totals = _StepTotals(len(batch), sum(len(sample.tokens) for sample in batch))
        sums = torch.zeros(3, device=self._device)
        with self._own_randomness():
            for rows, old_logprobs, advantages in chunks:
                logprobs = self._logprobs(rows, self._temperature)
                clip_low, clip_high = self._algorithm.clip_low, self._algorithm.clip_high
                loss, diagnostics = clipped_policy_loss(
                    logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high
                )
                torch.autograd.backward(loss)
                sums += diagnostics
                totals.trained_tokens += len(advantages)
        totals.loss, totals.clipped, totals.deviation = sums.tolist()
        self._totals.add(totals)
        return MicroBatchStats(
            samples=totals.samples,
            tokens=totals.tokens,
            trained_samples=sum(len(rows.input_ids) for rows, _, _ in chunks),
            seconds=perf_counter() - started,
        )

    def optimizer_step(self) -> StepStats:
        """See `PolicyBackend.optimizer_step`: divide by the step's tokens, clip, AdamW, schedule."""
        totals, tokens = self._totals, max(1, self._totals.tokens)
        lr = learning_rate(self._optimizer_config, self._version, self._total_steps)
        grad_norm = self._apply_gradient(tokens, lr)
        self._version += 1
        self._totals = _StepTotals()
        return StepStats(
            samples=totals.samples,
            tokens=totals.tokens,
            loss=totals.loss / tokens,
            grad_norm=grad_norm,
            clip_fraction=totals.clip_fraction,
            ratio_deviation=totals.ratio_deviation,
            lr=lr,
        )

    def _prepare(self, batch: Sequence[Sample]) -> list[tuple[PaddedRows, Tensor, Tensor]]:
        """Checks every sample, then makes chunks of (rows, old log-probs ``[N]``, advantages ``[N]``)."""
        trained: list[tuple[Sample, float]] = []
        for sample in batch:
            if sample.policy_version != self._version:
                raise StaleSample(sample.sample_id, sample.policy_version, self.name, self._version)
            if not len(sample.tokens) == len(sample.logprobs) > 0:
                counts = f"{len(sample.tokens)} tokens, {len(sample.logprobs)} log-probabilities"
                raise ValueError(
                    f"sample {sample.sample_id}: {counts}; need as many of each, and one at least"
                )
            scale = self._algorithm.scale_rewards
            advantage = group_advantage(sample.reward, sample.group_rewards, scale=scale)
            if advantage:
                trained.append((sample, advantage))
        lengths = np.array([len(s.prompt_tokens) + len(s.tokens) for s, _ in trained], np.int64)
        return [self._chunk([trained[row] for row in rows]) for rows in split_by_length(lengths)]

    def _chunk(self, trained: Sequence[tuple[Sample, float]]) -> tuple[PaddedRows, Tensor, Tensor]:
        rows = pad_rows([(sample.prompt_tokens, sample.tokens) for sample, _ in trained], self._vocab_size)
        old = np.concatenate([np.array(sample.logprobs, np.float32) for sample, _ in trained])
        counts = [len(sample.tokens) for sample, _ in trained]
        advantages = np.repeat(np.array([advantage for _, advantage in trained], np.float32), counts)
        device = self._device
        return rows.to(device), torch.from_numpy(old).to(device), torch.from_numpy(advantages).to(device)

    def _logprobs(self, rows: PaddedRows, temperature: float) -> Tensor:
        """Log-probabilities ``[N]`` of the completion tokens, with gradient."""
        self._positions = rows.positions
        try:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                logits = self.model(input_ids=rows.input_ids, use_cache=False).logits
        finally:
            self._positions = None
        return token_logprobs(logits, rows.targets, temperature)

    def _keep_completions(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """Before the output layer: hidden states ``[rows, longest, H]`` to the ``[N, H]`` at completions."""
        if self._positions is None:
            return None
        return (args[0].flatten(0, 1).index_select(0, self._positions),)

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

    def _apply_gradient(self, tokens: int, lr: float) -> float:
        """Divides the accumulated gradient by ``tokens``, clips, steps, zeroes; the norm before clipping."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        grad_norm = float(nn.utils.get_total_norm(gradients)) / tokens
        if not math.isfinite(grad_norm):
            raise NonFiniteGradient(self.name, self._version, grad_norm)
        # Dividing and clipping are one factor, so one pass over the gradient.
        clip = min(1.0, self._optimizer_config.max_grad_norm / (grad_norm + _CLIP_EPSILON))
        for gradient in gradients:
            gradient.mul_(clip / tokens)
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
        for name, tensors in files.items():
            check_tensors(folder / name, tensors)
        for name, tensors in files.items():
            read_tensors_into(folder / name, tensors)
        self._version = version
        self._totals = _StepTotals()
        self._warm_up_batches = 0
        self._optimizer.zero_grad(set_to_none=False)

    def _master_weights(self) -> dict[str, Tensor]:
        """The live state-dict tensors by name, those shared by several names (tied weights) once."""
        named = without_ties(self.model.state_dict(keep_vars=True))
        return {name: tensor.detach() for name, tensor in named.items()}

    def _training_state(self) -> dict[str, Tensor]:
        """The live tensors that a bit-equal continuation needs besides the weights."""
        state = {"rng": self._rng_state}
        for name, parameter in self.model.named_parameters():
            for moment, tensor in self._optimizer.state[parameter].items():
                state[f"{moment}.{name}"] = tensor
        return state


def _derived_seed(seed: int, name: str) -> int:
    """A seed of its own for every policy of a run, the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()) >> 1


def _random_stream(seed: int) -> Tensor:
    """The state (uint8) of torch's CPU generator just seeded; touches neither the global one nor a GPU."""
    return torch.Generator().manual_seed(seed).get_state()
