"""A loss of the user's own, in the place of an algorithm's surrogate, and its trial before the start."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from ....core.base.texts import text_of
from ...errors import RecipeError
from ..trainer_config import LossConfig
from .loss import TokenLosses, bounded_ratio
from .loss_inputs import LossInputs

LossFunction = Callable[[LossInputs], Tensor]
"""Pure: returns the loss of each token ``[N]``, to be minimised, with a gradient by the log-probabilities or entropies.
They are added up and divided as the setting ``aggregation`` says, so the function divides by no count of tokens."""

_TRIAL_LENGTHS: Final = (2, 1, 4)


class UsersLoss:
    """Calls ``function``, whose ``name`` is that of the config, and checks its result. ``frames``: makes the text of an
    error of the function's, see ``Recipe.frames``."""

    def __init__(self, name: str, function: LossFunction, frames: Callable[[BaseException], str]) -> None:
        self._name, self._function, self._frames = name, function, frames
        self._was_finite = False

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        """Raises RecipeError if the function fails, or its result is not a loss for each token."""
        try:
            losses: object = self._function(inputs)
        except torch.OutOfMemoryError:
            raise  # a setting of the trainer's, not a mistake of the function's
        except Exception as error:  # any error is the user's: the function may not fail
            text = f"{type(error).__name__}: {text_of(error)}"
            raise RecipeError(f"loss {self._name} failed: {text}\n{self._frames(error)}") from error
        checked = self._check(losses, inputs)
        ratio = bounded_ratio(inputs.logprobs, inputs.old_logprobs).detach()
        return TokenLosses(checked, torch.zeros_like(ratio, dtype=torch.bool), ratio)

    def _check(self, losses: object, inputs: LossInputs) -> Tensor:
        """Returns ``losses`` in the dtype of the log-probabilities. Raises RecipeError."""
        tokens = len(inputs.logprobs)
        if not isinstance(losses, Tensor):
            raise self._refusal(f"{type(losses).__name__}, not a tensor of the losses of {tokens} tokens")
        if losses.shape != inputs.logprobs.shape:
            remedy = "; it is added up behind the function" if losses.ndim == 0 else ""
            raise self._refusal(
                f"a tensor {list(losses.shape)}, not one loss for each of {tokens} tokens{remedy}"
            )
        if not losses.is_floating_point():
            raise self._refusal(f"a tensor of {losses.dtype}, not of floating numbers")
        if losses.device != inputs.logprobs.device:
            raise self._refusal(
                f"a tensor on {losses.device}, and the tokens are on {inputs.logprobs.device}"
            )
        if not losses.requires_grad:
            raise self._refusal(
                "losses without a gradient: compute them from inputs.logprobs, without detach() or no_grad()"
            )
        # At the first use alone: to look at a value is to wait for a GPU.
        if not self._was_finite and not bool(losses.detach().isfinite().all()):
            raise self._refusal("losses that are infinite or not a number")
        self._was_finite = True
        return losses.to(inputs.logprobs.dtype)

    def _refusal(self, result: str) -> RecipeError:
        return RecipeError(f"loss {self._name} returns {result}")


def loss_problems(function: Callable[..., Any], loss: UsersLoss, config: LossConfig) -> Iterator[str]:
    """The mistakes that show without a model: ``function``, which ``loss`` calls, is tried on made-up tokens."""
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        yield "it is async: write def"
        return
    inputs = _trial_inputs(config, _TRIAL_LENGTHS)
    try:
        values = loss(inputs).values
        yield from _gradient_problems(values, inputs)
        for start, length, part in _sequences(inputs):
            alone = loss(part).values
            if not torch.allclose(alone, values[start : start + length], rtol=1e-4, atol=1e-6):
                yield (
                    "the losses of a sequence are others if it is alone in the batch: micro-batches would change the "
                    "gradient. Compute them from the sequence's own tokens"
                )
                return
    except RecipeError as error:
        yield str(error)


def _gradient_problems(values: Tensor, inputs: LossInputs) -> Iterator[str]:
    leaves = [tensor for tensor in (inputs.logprobs, inputs.entropies) if tensor is not None]
    gradients = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        yield "the losses have no gradient by the log-probabilities"
    elif not all(bool(gradient.isfinite().all()) for gradient in present):
        yield "the gradient of the losses is infinite or not a number"


def _trial_inputs(config: LossConfig, lengths: tuple[int, ...]) -> LossInputs:
    """Tokens of three sequences, whose ratios to the old policy lie within and beyond a usual clip."""
    tokens, generator = sum(lengths), torch.Generator().manual_seed(0)

    def draw(low: float, high: float, count: int = tokens) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    logprobs = draw(-3.0, -0.1)
    by_sequence = torch.tensor(lengths)
    return LossInputs(
        logprobs=logprobs.clone().requires_grad_(),
        old_logprobs=logprobs + draw(-0.5, 0.5),
        behaviour_logprobs=logprobs + draw(-0.5, 0.5),
        advantages=draw(-1.0, 1.0, len(lengths)).repeat_interleave(by_sequence),
        lengths=by_sequence,
        group_sizes=torch.full_like(by_sequence, 4),
        rewards=draw(0.0, 1.0, len(lengths)),
        reference_logprobs=logprobs + draw(-0.5, 0.5) if config.needs_references else None,
        entropies=draw(0.1, 2.0).requires_grad_() if config.entropy_coefficient else None,
        columns={name: torch.ones(tokens) for name in config.loss_columns},
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        options=config.options,
    )


def _sequences(inputs: LossInputs) -> Iterator[tuple[int, int, LossInputs]]:
    """The first token, the length, and the inputs of each sequence alone."""
    starts = (inputs.lengths.cumsum(0) - inputs.lengths).tolist()
    for number, (start, length) in enumerate(zip(starts, inputs.lengths.tolist(), strict=True)):
        tokens, row = slice(start, start + length), slice(number, number + 1)
        yield (
            start,
            length,
            LossInputs(
                logprobs=inputs.logprobs[tokens],
                old_logprobs=inputs.old_logprobs[tokens],
                behaviour_logprobs=inputs.behaviour_logprobs[tokens],
                advantages=inputs.advantages[tokens],
                lengths=inputs.lengths[row],
                group_sizes=inputs.group_sizes[row],
                rewards=inputs.rewards[row],
                reference_logprobs=None
                if inputs.reference_logprobs is None
                else inputs.reference_logprobs[tokens],
                entropies=None if inputs.entropies is None else inputs.entropies[tokens],
                columns={name: values[tokens] for name, values in inputs.columns.items()},
                clip_low=inputs.clip_low,
                clip_high=inputs.clip_high,
                options=inputs.options,
            ),
        )
