"""A Hugging Face causal language model that computes the log-probabilities of completions."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .....transport.state_dict import without_ties
from ....messages import ModelConfig
from ....model_sources import rotation_limit
from ....pretrained import leave_out_cudnn
from ....routers import refuse_unread, replay_routes
from ....truncated_scores import Truncations
from ...objective.loss import token_logprobs, token_logprobs_and_entropies
from ...padding import PaddedRows, TokenRow, check_tokens
from ...rank_bytes import logits_limit
from .compiled import compile_layers, compiled_token_logprobs
from .fused_norm import fuse_norms
from .gang_rank import ALONE, GangRank
from .layers import recompute_layers
from .model_rows import Rows, fill, outline
from .narrow_forward import (
    Place,
    modules_outside,
    narrow_layers,
    narrow_parameters,
    places_in,
    round_embeddings,
)
from .onednn_linear import use_onednn
from .packed_attention import check_read, pack_attention
from .summed_linear import SummedLinear


def most_logits_bytes(device: torch.device) -> int:
    """Logits (float32) that are in memory at a time on ``device``: see ``logits_limit``."""
    if device.type != "cuda":
        return logits_limit(None)
    return logits_limit(torch.cuda.get_device_properties(device).total_memory)


MASTER_DTYPE: torch.dtype = torch.float32
"""The type of the weights that are trained."""


def outlined_model(config: ModelConfig, seed: int | None, gang: GangRank) -> tuple[Any, Rows]:
    """A Hugging Face causal language model on ``meta``, in evaluation mode, and this rank's rows of its float32 master
    weights, which ``fill`` gives it. It has fused norms, and oneDNN's products where they are faster.

    Without dropout, as in the engine: the gradient is that of the policy that generated. TRL does the same. ``seed``
    fixes the random weights of a model made from ``config.config``, independently of models built before in this
    process; None leaves the weights unset. Torch's global generator is left as it was.
    """
    model, rows = outline(config, seed, MASTER_DTYPE, gang)
    model.config.architectures = [type(model).__name__]
    model = fuse_norms(model)
    if config.dtype == "float32" and torch.device(config.device).type == "cpu":
        model = use_onednn(model)
    return model, rows


def freeze(model: Any, config: ModelConfig) -> None:
    """The model, whose parameters are on ``meta``, gets weights without gradients, in the type that is computed with:
    those that are never trained need no other. Buffers stay: rotations are of float32."""
    model.requires_grad_(False)
    if config.dtype != "bfloat16":
        return
    outlines: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in outlines:
                narrow = parameter.detach().to(torch.bfloat16)
                outlines[id(parameter)] = nn.Parameter(narrow, requires_grad=False)
            setattr(module, name, outlines[id(parameter)])


def dropout_settings(model: Any) -> dict[str, float]:
    """The dropout probabilities above 0 in the model's config, by name."""
    settings = model.config.get_text_config(decoder=True).to_dict()
    return {
        name: value
        for name, value in settings.items()
        if "drop" in name and isinstance(value, float) and value > 0
    }


def placed_model(config: ModelConfig, seed: int | None) -> Any:
    """The whole of ``outlined_model`` on the config's device."""
    model, rows = outlined_model(config, seed, ALONE)
    fill(model, model, rows, torch.device(config.device))
    return model


OfLogits = Callable[[Tensor, Tensor, float | Tensor, Truncations | None], Tensor]
"""Figures of tokens, ``[N, ...]``, from the arguments of ``token_logprobs``."""


class CompletionModel:
    """``model`` is the live module, its parameters float32, on the config's device or on ``meta`` before ``fill``."""

    def __init__(self, config: ModelConfig, model: Any) -> None:
        leave_out_cudnn()
        self.device = torch.device(config.device)
        self.model = model
        self.vocab_size = int(self.model.get_input_embeddings().num_embeddings)
        self.is_bfloat16 = config.dtype == "bfloat16"
        self._longest = rotation_limit(self.model.config)
        self._forward = CompletionForward(self.model, self.vocab_size)
        self._token_logprobs: OfLogits = token_logprobs
        self._is_compiled = False

    def logprobs(
        self, rows: PaddedRows, temperatures: float | Tensor = 1.0, truncations: Truncations | None = None
    ) -> Tensor:
        """Log-probabilities ``[N]`` of the completion tokens, with gradient. ``temperatures``: one, or ``[N]``.
        ``truncations``: of N distributions, see ``token_logprobs``.

        Raises ``ValueError`` for rows beyond the model's ``rotation_limit``.
        """
        return self._figures(self._token_logprobs, rows, temperatures, truncations)

    def logprobs_and_entropies(
        self, rows: PaddedRows, temperatures: float | Tensor, truncations: Truncations | None
    ) -> tuple[Tensor, Tensor]:
        """The same, and the entropies ``[N]`` of the distributions that the tokens were drawn from."""
        # Not compiled as the log-probabilities are: the function has a backward that is written out.
        figures = self._figures(token_logprobs_and_entropies, rows, temperatures, truncations)
        logprobs, entropies = figures.unbind(-1)
        return logprobs, entropies

    def _figures(
        self,
        of_logits: OfLogits,
        rows: PaddedRows,
        temperatures: float | Tensor,
        truncations: Truncations | None,
    ) -> Tensor:
        self._check_length(rows.longest)
        figures: Tensor = self._forward(of_logits, rows, temperatures, truncations)
        return figures

    def fixed_logprobs(
        self,
        rows: PaddedRows,
        temperatures: float | Tensor,
        truncations: Truncations | None,
        gang: GangRank,
    ) -> Tensor:
        """The same without gradient, of a model that is divided over ``gang``."""
        with torch.no_grad():
            logprobs = self.logprobs(rows, temperatures, truncations)
        gang.release(self._forward)
        return logprobs

    def likeliest(self, rows: PaddedRows, count: int, gang: GangRank) -> Tensor:
        """The ``count`` likeliest tokens at each completion token's place, in descending order, and their
        log-probabilities at temperature 1: float64 ``[N, 2, count]``."""
        try:
            with torch.no_grad(), self._leave_uncompiled():
                likeliest: Tensor = self._forward(partial(_likeliest, count), rows, 1.0)
        finally:
            gang.release(self._forward)
        return likeliest

    def _leave_uncompiled(self) -> AbstractContextManager[object]:
        # A layer would be compiled once more for a forward without gradient, which takes seconds.
        return torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext()

    def check(self, rows: Sequence[TokenRow]) -> None:
        """Raises ``ValueError`` for rows that ``pad_rows`` or ``logprobs`` would refuse."""
        check_tokens(rows, self.vocab_size)
        self._check_length(max((len(prompt) + len(tokens) for prompt, tokens in rows), default=1) - 1)

    def replay_routes(self) -> None:
        """From now on the model computes with the ``routes`` of its rows. To be called before ``compile`` and
        ``narrow``. Raises UnsupportedModel as ``routers.replay_routes``."""
        replay_routes(self.model)
        self._forward.replays_routes = True

    def pack(self) -> bool:
        """True if rows may lie end to end from now on: see ``pack_attention``."""
        return pack_attention(self.model, self.device, torch.bfloat16 if self.is_bfloat16 else torch.float32)

    def recompute_layers(self) -> None:
        """From now on a layer's activations are computed again in the backward. Raises as ``recompute_layers``."""
        recompute_layers(self.model)

    def compile(self) -> None:
        """From now on layers and log-probabilities are compiled. To be called before ``narrow``."""
        compile_layers(self.model)
        self._is_compiled = True
        self._token_logprobs = compiled_token_logprobs

    def narrow(self) -> None:
        """From now on a model of bfloat16 computes in it, over weights of any type. To be called before
        ``recompute_layers``."""
        if self.is_bfloat16:
            self._forward.narrow()

    def shard(self, gang: GangRank, *, trained: bool) -> None:
        """Divides the parameters over ``gang``. ``trained``: a backward follows each forward."""
        gang.shard(self._forward, keep_root=trained, bfloat16=self.is_bfloat16)

    def fill(self, rows: Rows) -> None:
        """Gives parameters on ``meta`` memory on the config's device, with the ``rows`` by their names in the model."""
        fill(self._forward, self.model, rows, self.device)

    def _check_length(self, tokens: int) -> None:
        if self._longest is not None and tokens > self._longest:
            raise ValueError(
                f"{tokens} tokens: the model's rotations (longrope) change behind {self._longest}"
            )


class CompletionForward(nn.Module):
    """Figures of completions, such as log-probabilities, as one forward, so that a gang gathers all that it needs.

    The output layer and everything after it see the completion tokens only: ``[N, V]``, no padding, and never all of it
    if that is more than ``most_logits_bytes``.
    """

    def __init__(self, model: Any, vocab_size: int) -> None:
        super().__init__()
        self.model = model
        self._vocab_size = vocab_size
        self._positions: Tensor | slice | None = None
        self._outside: Sequence[Place] = ()
        self._of_output: Sequence[Place] = ()
        self._sums_output = False
        self.replays_routes = False
        model.get_output_embeddings().register_forward_pre_hook(self._keep_completions)

    def forward(
        self,
        of_logits: OfLogits,
        rows: PaddedRows,
        temperatures: float | Tensor,
        truncations: Truncations | None = None,
    ) -> Tensor:
        """``[N, ...]``, as ``of_logits`` has it. See ``CompletionModel.logprobs``."""
        with narrow_parameters(self._outside):
            return self._figures(of_logits, rows, temperatures, truncations)

    def narrow(self) -> None:
        """From now on it computes in bfloat16: see ``narrow_forward``."""
        narrow_layers(self.model)
        round_embeddings(self.model)
        output = self.model.get_output_embeddings()
        self._sums_output = type(output) is nn.Linear
        outside = [module for module in modules_outside(self.model) if module is not output]
        self._of_output = [] if self._sums_output else places_in(output.modules())
        self._outside = [*places_in(outside), *self._of_output]

    def _figures(
        self,
        of_logits: OfLogits,
        rows: PaddedRows,
        temperatures: float | Tensor,
        truncations: Truncations | None,
    ) -> Tensor:
        most_tokens = max(1, most_logits_bytes(rows.input_ids.device) // (4 * self._vocab_size))
        if len(rows.targets) > most_tokens and self.model.base_model is not self.model:
            return self._in_chunks(of_logits, rows, temperatures, truncations, most_tokens)
        with self._keep(rows.positions), self._output_layer(self._summed_output()):
            logits = self.model(**self._inputs(rows)).logits
        self._check_read(rows)
        return of_logits(logits, rows.targets, temperatures, truncations)

    def _in_chunks(
        self,
        of_logits: OfLogits,
        rows: PaddedRows,
        temperatures: float | Tensor,
        truncations: Truncations | None,
        tokens: int,
    ) -> Tensor:
        body = self.model.base_model(**self._inputs(rows))
        self._check_read(rows)
        hidden = body.last_hidden_state.flatten(0, 1).index_select(0, rows.positions)
        # Of equal size: a rest of a single token would be a variant of its own of the compiled log-probabilities.
        tokens = -(-len(hidden) // -(-len(hidden) // tokens))
        chunks = zip(torch.split(hidden, tokens), torch.split(rows.targets, tokens), strict=True)
        temperature_parts = torch.split(temperatures, tokens) if isinstance(temperatures, Tensor) else None
        cut = truncations.split(tokens) if truncations is not None else None
        head = partial(self._head, of_logits, type(body), self._summed_output())
        return torch.cat(
            [
                checkpoint(
                    head, *chunk, temperature_parts[number] if temperature_parts else temperatures,
                    cut[number] if cut else None,
                    use_reentrant=False, preserve_rng_state=False,
                )
                for number, chunk in enumerate(chunks)
            ]
        )  # fmt: skip

    def _inputs(self, rows: PaddedRows) -> dict[str, Any]:
        if not self.replays_routes or rows.routes is None:
            return rows.model_inputs
        return rows.model_inputs | {"expert_routes": rows.routes}

    def _check_read(self, rows: PaddedRows) -> None:
        check_read(rows, self.model)
        if self.replays_routes and rows.routes is not None and not rows.routes.was_read:
            refuse_unread(self.model)

    def _summed_output(self) -> SummedLinear | None:
        """The output layer in bfloat16 for all chunks of a forward; None if it computes with its own parameters."""
        return SummedLinear(self.model.get_output_embeddings()) if self._sums_output else None

    def _output_layer(self, layer: SummedLinear | None) -> AbstractContextManager[None]:
        """Within it ``layer`` computes for the output layer."""
        return nullcontext() if layer is None else _forward(self.model.get_output_embeddings(), layer)

    def _head(
        self,
        of_logits: OfLogits,
        output: Any,
        layer: SummedLinear | None,
        hidden: Tensor,
        targets: Tensor,
        temperatures: float | Tensor,
        truncations: Truncations | None,
    ) -> Tensor:
        """The model's own forward behind its body, which gives an ``output``: with all that a model does to its
        logits."""
        body_output = output(last_hidden_state=hidden.unsqueeze(0))
        with ExitStack() as stack:
            stack.enter_context(_forward(self.model.base_model, lambda *_args, **_settings: body_output))
            stack.enter_context(self._output_layer(layer))
            stack.enter_context(narrow_parameters(self._of_output))
            # The logits of a chunk are ``[N, V]`` at once, as those of a forward without chunks: a view of more would
            # be a variant of its own of a compiled function.
            stack.enter_context(self._keep(slice(None)))
            logits = self.model.forward(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return of_logits(logits, targets, temperatures, truncations)

    @contextmanager
    def _keep(self, positions: Tensor | slice) -> Iterator[None]:
        """Within it the output layer sees the hidden states at ``positions`` alone, ``[N, H]``."""
        self._positions = positions
        try:
            yield
        finally:
            self._positions = None

    def _keep_completions(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """Before the output layer: hidden states ``[rows, longest, H]`` to the ``[N, H]`` at the positions."""
        if self._positions is None:
            return None
        hidden = args[0].flatten(0, 1)
        return (hidden if isinstance(self._positions, slice) else hidden.index_select(0, self._positions),)


def _likeliest(count: int, logits: Tensor, *_: object) -> Tensor:
    """In place of ``token_logprobs``: see ``CompletionModel.likeliest``."""
    logprobs, tokens = logits.double().log_softmax(-1).topk(min(count, logits.shape[-1]), -1)
    return torch.stack([tokens.double(), logprobs], 1)


@contextmanager
def _forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Within it the forward of ``module`` is another one."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """The live state-dict tensors by name, those shared by several names (tied weights) once."""
    return {name: tensor.detach() for name, tensor in without_ties(model.state_dict(keep_vars=True)).items()}


def derived_seed(seed: int, name: str) -> int:
    """A seed of its own for every policy of a run, the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()) >> 1
