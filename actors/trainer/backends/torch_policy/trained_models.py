"""All memory of a policy in training: its modules with their gradients and moments, and the files of them."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ....errors import CheckpointMismatch
from ....json_files import read_json, write_json
from ...policy_files import check_tensors, read_tensors_into, write_tensors
from ...saved_policy import (
    ADAPTER_FILE,
    CRITIC_FILE,
    POSITION_FILE,
    REFERENCE_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
)
from ...shards import Shard, whole
from ...trainer_setup import PolicySetup
from .adamw import configure, drop_gradient, gradients, make_adamw, moments, trained_parameters
from .compiled import is_compiled
from .completion_model import CompletionModel, freeze, named_weights, outlined_model
from .critic_model import CriticModel
from .frozen_base import FrozenBase, FrozenBases
from .gang_rank import ALONE, GangRank, local
from .model_rows import Rows, own_rows
from .own_weights import file_name, own_weights, saved_weights
from .replica_sums import ReplicaSums
from .row_gathering import gather_rows
from .state_memory import StateMemory

FORMAT: Final = 2
"""The files of a policy. In format 1 a base had another digest, and references of models in bfloat16 were in
float32."""


class TrainedModels:
    """``completions`` is the policy's model; ``reference`` and ``critic`` are there if the algorithm needs them.
    ``packs``: all of them compute samples that lie end to end. ``replica_sums``: of their gradients.

    Policies that ``fit`` can use the same models one after the other. It is one class because parts, files, published
    weights and memory are views of the same tensors, whose names and order are its own.
    """

    def __init__(
        self,
        setup: PolicySetup,
        seed: int | None,
        gang: GangRank,
        bases: FrozenBases,
        memory: StateMemory | None = None,
    ) -> None:
        """``seed`` is the policy's own; None leaves the weights unset, for a state to be loaded. ``bases``: of this
        process; a LoRA policy is an adapter over one of them, and its reference and critic are others.

        ``memory`` has such a state, and is taken over: gradients and moments as they are, and weights if
        all ranks have as many rows; FSDP2 copies others, to pad them.

        Modules are made without memory for their weights, and divided over ``gang``: no rank has a whole model at any
        time.
        """
        self._setup = setup
        self.gang = gang
        model, loss = setup.real_model, setup.loss
        memory = memory or StateMemory()
        self._base = None if setup.lora is None else bases.base_of(model, gang)
        self._weights_file = WEIGHTS_FILE if self._base is None else ADAPTER_FILE
        self.reference = self._make_reference(memory) if loss.kl_coefficient else None
        self.completions, rows = self._completion_model(seed)
        self.packs = setup.torch_trainer.packing and self.completions.pack()
        compiled = self._is_compiled(self.completions)
        self.critic = None
        if loss.critic:
            self.critic = CriticModel(
                self.completions,
                loss.critic,
                setup.optimizer,
                gang,
                memory,
                base={} if self._base is None else self._base.rows_in(self.completions.model),
                recompute=setup.torch_trainer.activation_checkpointing,
                compiled=compiled,
            )
        # Behind the critic: that is a copy, which chooses its experts itself.
        self._wrap_layers(compiled=compiled)
        # The same mapping, not a copy: what has been read is taken out of it, and with the last the file is closed.
        rows |= memory.rows(f"{Path(self._weights_file).stem}/")
        self.completions.fill(rows)
        self.parameters = trained_parameters(self.completions.model, memory, "gradient", file_name)
        self.optimizer = make_adamw(self.parameters, setup.optimizer, memory, Path(STATE_FILE).stem)
        trained = [self.completions.model, *([] if self.critic is None else [self.critic.model])]
        self.replica_sums = ReplicaSums((weight for part in trained for weight in part.parameters()), gang)
        self._bfloat16 = model.dtype == "bfloat16"
        state = self.base_state()
        for name in list(memory.tensors.keys() & state.keys()):
            state[name].copy_(memory.tensors.pop(name))
        if seed is not None:
            self.start_from_here()

    def _wrap_layers(self, *, compiled: bool) -> None:
        """Sets how the policy's layers are computed, each way around the ones before."""
        completions = self.completions
        if self._setup.real_model.router_replay:
            completions.replay_routes()
        if compiled:
            completions.compile()
        completions.narrow()
        if self._setup.torch_trainer.activation_checkpointing:
            completions.recompute_layers()
        completions.shard(self.gang, trained=True)

    def _make_reference(self, memory: StateMemory) -> CompletionModel:
        """A model without gradients, in the type that it computes in; an adapter's reference is as the adapter. Its
        weights are those of ``memory``, as far as it has them."""
        reference, rows = self._completion_model(None)
        if self._base is None:
            freeze(reference.model, self._setup.real_model)
        reference.model.requires_grad_(False)
        if self._setup.torch_trainer.packing:
            reference.pack()
        if self._is_compiled(reference):
            reference.compile()
        reference.narrow()
        reference.shard(self.gang, trained=False)
        rows |= memory.rows(f"{Path(REFERENCE_FILE).stem}/")
        reference.fill(rows)
        return reference

    def _is_compiled(self, completions: CompletionModel) -> bool:
        return is_compiled(
            self._setup.torch_trainer.compilation,
            completions.model,
            completions.device,
            replays_routes=self._setup.real_model.router_replay,
        )

    def _completion_model(self, seed: int | None) -> tuple[CompletionModel, Rows]:
        """With the rows of its weights that are to be filled in."""
        setup = self._setup
        model = setup.real_model
        if self._base is None or setup.lora is None:
            network, rows = outlined_model(model, seed, self.gang)
            return CompletionModel(model, network), rows
        from .adapters import with_adapter  # imported here: peft takes seconds, and may not be installed

        base = self._base
        network, values = with_adapter(
            base.outline, setup.lora, seed, dtype=base.master_dtype, path=model.path
        )
        adapter = {name: partial(own_rows, value, self.gang) for name, value in values.items()}
        return CompletionModel(model, network), base.rows_in(network) | adapter

    def fit(self, setup: PolicySetup, gang: GangRank) -> bool:
        """True if a policy of ``setup`` has the same tensors in ``gang``."""
        return self.gang is gang and _shape(setup) == _shape(self._setup)

    def take_settings(self, setup: PolicySetup) -> None:
        """The optimizers continue with the settings of ``setup``, which must ``fit``."""
        self._setup = setup
        configure(self.optimizer, setup.optimizer)
        if self.critic is not None and setup.loss.critic is not None:
            self.critic.take_settings(setup.loss.critic, setup.optimizer)

    def base_state(self) -> dict[str, Tensor]:
        """See ``PolicyBackend.base_state``: ``{file without its suffix}/{name in the file}``."""
        return {
            f"{Path(file).stem}/{name}": tensor
            for file, tensors in self.files().items()
            for name, tensor in tensors.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """The live gradients, ``gradient/{parameter}`` and ``critic_gradient/{parameter}``."""
        tensors = {f"gradient/{name}": gradient for name, gradient in gradients(self.parameters).items()}
        if self.critic is not None:
            tensors |= {
                f"critic_gradient/{name}": gradient for name, gradient in self.critic.gradients().items()
            }
        return tensors

    def frozen_state(self) -> dict[str, Tensor]:
        """See ``PolicyBackend.frozen_state``."""
        return {} if self._base is None else self._base.rows

    def parts(self) -> dict[str, Shard]:
        """See ``PolicyBackend.parts``."""
        shards = {
            f"{Path(file).stem}/{name}": part
            for file, parts in self._parts().items()
            for name, part in parts.items()
        }
        for name in self.gradients():
            kind, _, parameter = name.partition("/")
            file = CRITIC_FILE if kind == "critic_gradient" else self._weights_file
            shards[name] = shards[f"{Path(file).stem}/{parameter}"]
        return shards

    def start_from_here(self) -> None:
        """Reinforcement learning starts from the present weights: so do reference and critic."""
        if self.reference is not None:
            weights = own_weights(self.reference.model)
            for name, tensor in own_weights(self.completions.model).items():
                local(weights[name]).copy_(local(tensor))
        if self.critic is not None:
            self.critic.start_from(self.completions)

    def drop_gradients(self) -> None:
        """Forgets the accumulated gradients, of the critic too."""
        drop_gradient(self.optimizer)
        if self.critic is not None:
            self.critic.drop_gradient()

    def published(self) -> dict[str, Tensor]:
        """See ``PolicyBackend.weights``: state-dict tensors, detached, in the precision the model computes in.

        Float32 ones are the live weights themselves, and others are copies. A LoRA policy publishes the weights of the
        whole model, with its adapter in them, or its adapter alone with ``alpha / rank`` in ``B``.
        """
        assert self.gang is ALONE, "weights of a gang are gathered"
        return {name: tensor.to(self._published_dtype(tensor)) for name, tensor in self._engine_weights()}

    def live_weights(self) -> dict[str, Tensor]:
        """See ``PolicyBackend.live_weights``."""
        if self._bfloat16 or self.gang is not ALONE or (self._base and not self._setup.publishes_adapter):
            return {}
        weights = self.published()
        live = {tensor.data_ptr() for tensor in own_weights(self.completions.model).values()}
        return weights if all(tensor.data_ptr() in live for tensor in weights.values()) else {}

    def weights_outline(self) -> dict[str, Tensor]:
        """See ``PolicyBackend.weights_outline``."""
        if self.gang.rank:
            return {}
        if self._base is None:
            weights = named_weights(self.completions.model)
        elif self._setup.publishes_adapter:
            adapter = own_weights(self.completions.model)
            weights = {file_name(name): tensor for name, tensor in adapter.items()}
        else:
            weights = named_weights(self._base.outline)
        return {
            name: torch.empty(tensor.shape, dtype=self._published_dtype(tensor), device="meta")
            for name, tensor in weights.items()
        }

    def gather_weights(self, into: Mapping[str, Tensor]) -> None:
        """See ``PolicyBackend.gather_weights``."""
        gather_rows(self.gang, self._engine_weights(), into, torch.bfloat16 if self._bfloat16 else None)

    def _published_dtype(self, tensor: Tensor) -> torch.dtype:
        return torch.bfloat16 if self._bfloat16 and tensor.is_floating_point() else tensor.dtype

    def _engine_weights(self) -> Iterable[tuple[str, Tensor]]:
        if self._base is None:
            return named_weights(self.completions.model).items()
        from .adapters import adapter_weights, merged_weights

        if self._setup.publishes_adapter:
            return adapter_weights(self.completions.model)
        return merged_weights(self.completions.model, self.gang)

    # ----------------------------------------------------------------------- files

    def files(self) -> dict[str, Mapping[str, Tensor]]:
        """The live tensors of a saved policy, by the file that they are in."""
        files: dict[str, Mapping[str, Tensor]] = {
            self._weights_file: saved_weights(self.completions.model),
            STATE_FILE: moments(self.parameters, self.optimizer),  # all that a bit-equal continuation needs
        }
        if self.reference is not None:
            files[REFERENCE_FILE] = saved_weights(self.reference.model)
        if self.critic is not None:
            files[CRITIC_FILE] = self.critic.state()
        return files

    def save(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, version: int, role_means: Mapping[str, float]
    ) -> None:
        """See ``PolicyBackend.save``. ``folder`` is created; the weights are written in float32. ``role_means``: of
        ``RoleBaselines``.

        The files are those of one rank: each rank of the first replica writes its own rows of every tensor, the first
        one everything else.
        """
        model, first = self.completions.model, self.gang.rank == 0
        base = _plain_base(self._base, self.gang)
        if not self.gang.is_in_first_replica:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if first:
            if self._base is None:
                model.config.save_pretrained(folder)
                model.generation_config.save_pretrained(folder)
            else:
                from .adapters import write_adapter_config

                write_adapter_config(model, folder)
            tokenizer.save_pretrained(folder)
            position: dict[str, object] = {"format": FORMAT, "version": version}
            if role_means:
                position["role_means"] = dict(role_means)
            write_json(folder / POSITION_FILE, position | base)
        parts = self._parts()
        for name, tensors in self.files().items():
            write_tensors(folder / name, tensors, parts[name], first=first)

    def load(self, folder: Path) -> tuple[int, dict[str, float]]:
        """See ``PolicyBackend.load``; returns the version and the means of ``RoleBaselines``. The folder may be of any
        number of ranks."""
        position = read_position_file(folder / POSITION_FILE, self._base, self.gang)
        self._check_adapter(folder)
        files, parts = self.files(), self._parts()
        for name, tensors in files.items():
            check_tensors(folder / name, tensors, parts[name])
        for name, tensors in files.items():
            read_tensors_into(folder / name, tensors, parts[name])
        self.drop_gradients()
        return position

    def start_from(self, folder: Path) -> None:
        """See ``PolicyBackend.start_from``."""
        self._check_adapter(folder)
        if self._base is not None and (folder / POSITION_FILE).exists():  # an adapter may come from elsewhere
            check_base(folder / POSITION_FILE, self._base.digest(self.gang))
        file = self._weights_file
        weights, parts = saved_weights(self.completions.model), self._parts()[file]
        check_tensors(folder / file, weights, parts)
        read_tensors_into(folder / file, weights, parts)
        self.start_from_here()

    def _check_adapter(self, folder: Path) -> None:
        if self._setup.lora is not None:
            from .adapters import check_adapter_config

            check_adapter_config(folder, self._setup.lora)

    def _parts(self) -> dict[str, dict[str, Shard]]:
        """This rank's part of every tensor of ``files``."""
        models = {self._weights_file: self.completions.model, STATE_FILE: self.completions.model}
        if self.reference is not None:
            models[REFERENCE_FILE] = self.reference.model
        if self.critic is not None:
            models[CRITIC_FILE] = self.critic.model
        files = self.files()
        return {file: self._parts_of(model, files[file]) for file, model in models.items()}

    def _parts_of(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
        """``tensors``: weights of ``model`` and moments of them, by name."""
        weights = named_weights(model) | {
            file_name(name): parameter for name, parameter in model.named_parameters()
        }
        parts = {}
        for name, tensor in tensors.items():
            weight = weights[name if name in weights else name.partition(".")[2]]
            parts[name] = self.gang.part(weight) if tensor.dim() else whole(())
        return parts


def copy_into(destination: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copies every tensor of ``source`` into that of the same name.

    Raises ``ValueError`` before anything is copied, which names the first difference of names, shapes or dtypes.
    """
    for name in sorted(destination.keys() | source.keys()):
        needed, available = (_outline(tensors.get(name)) for tensors in (destination, source))
        if needed != available:
            raise ValueError(f"tensor {name}: need {needed}, there is {available}")
    with torch.no_grad():
        for name, tensor in destination.items():
            tensor.copy_(source[name])


def _outline(tensor: Tensor | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _shape(setup: PolicySetup) -> tuple[object, ...]:
    trainer = setup.torch_trainer
    return (
        setup.real_model,
        setup.lora,
        trainer.activation_checkpointing,
        trainer.packing,
        trainer.compilation,
        setup.loss.critic is None,
        setup.loss.kl_coefficient == 0.0,
    )


def _plain_base(base: FrozenBase | None, gang: GangRank) -> dict[str, object]:
    return {} if base is None else {"base": base.plain(gang)}


def read_position_file(path: Path, base: FrozenBase | None, gang: GangRank) -> tuple[int, dict[str, float]]:
    """The version and the means of ``RoleBaselines``. Raises CheckpointIncomplete, and CheckpointMismatch also if the
    file's base is not ``base``."""
    position = _read_position(path)
    version = position.get("version")
    if type(version) is not int or version < 0:
        raise CheckpointMismatch(path, "version", "a count", repr(version))
    means = position.get("role_means", {})
    if not isinstance(means, dict) or not all(isinstance(mean, float) for mean in means.values()):
        raise CheckpointMismatch(path, "role_means", "a number for each agent", repr(means))
    check_base(path, None if base is None else base.digest(gang))
    return version, means


def _read_position(path: Path) -> dict[str, Any]:
    """Raises CheckpointIncomplete, and CheckpointMismatch if ``path`` is of another format, whose digests differ."""
    position = read_json(path)
    if position.get("format") != FORMAT:
        raise CheckpointMismatch(path, "format", str(FORMAT), str(position.get("format")))
    return position


def check_base(path: Path, digest: str | None) -> None:
    """Raises CheckpointIncomplete, and CheckpointMismatch if ``path`` was written with another base than that with this
    ``digest``; None: with any."""
    base, whole_model = _read_position(path).get("base"), "of a whole model"
    actual = base["digest"] if isinstance(base, dict) else whole_model
    if actual != (digest or whole_model):
        raise CheckpointMismatch(path, "digest of the base model", digest or whole_model, actual)
