"""All memory of a policy in training: its modules with their gradients and moments, and the files of them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ....errors import CheckpointMismatch
from ....json_files import read_json, write_json
from ...policy_files import check_tensors, read_tensors_into, write_tensors
from ...saved_policy import CRITIC_FILE, POSITION_FILE, REFERENCE_FILE, STATE_FILE, WEIGHTS_FILE
from ...shards import Shard, whole
from ...trainer_setup import PolicySetup
from .adamw import configure, drop_gradient, gradients, make_adamw, moments, trained_parameters
from .completion_model import CompletionModel, named_weights
from .critic_model import CriticModel
from .gang_rank import ALONE, GangRank, local
from .state_memory import StateMemory

FORMAT = 1


class TrainedModels:
    """``completions`` is the policy's model; ``reference`` and ``critic`` are there if the algorithm needs them.

    Policies that ``fit`` can use the same models one after the other.
    """

    def __init__(
        self,
        setup: PolicySetup,
        seed: int | None,
        gang: GangRank = ALONE,
        memory: StateMemory | None = None,
    ) -> None:
        """``seed`` is the policy's own; None leaves the weights unset, for a state to be loaded.

        ``memory`` has such a state, and is taken over: gradients and moments as they are, and the weights, whose memory
        FSDP2 allocates, are copied.

        Each model is whole for a moment, one after the other, before it is divided over ``gang``; the policy's is so
        together with its critic.
        """
        self._setup = setup
        self.gang = gang
        model, loss = setup.real_model, setup.loss
        memory = memory or StateMemory()
        recompute = setup.torch_trainer.activation_checkpointing
        self.reference = CompletionModel(model, seed) if loss.kl_coefficient else None
        if self.reference is not None:
            self.reference.model.requires_grad_(False)
            self.reference.shard(gang, trained=False)
        self.completions = CompletionModel(model, seed)
        self.critic = None
        if loss.critic:
            self.critic = CriticModel(
                self.completions, loss.critic, setup.optimizer, gang, memory, recompute=recompute
            )
        if recompute:
            self.completions.recompute_layers()
        self.completions.shard(gang, trained=True)
        self.parameters = trained_parameters(self.completions.model, memory, "gradient")
        self.optimizer = make_adamw(self.parameters, setup.optimizer, memory, Path(STATE_FILE).stem)
        self._bfloat16 = model.dtype == "bfloat16"
        own = self.base_state()
        for name in list(memory.tensors.keys() & own.keys()):
            own[name].copy_(memory.tensors.pop(name))

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
        found = {f"gradient/{name}": each for name, each in gradients(self.parameters).items()}
        if self.critic is not None:
            found |= {f"critic_gradient/{name}": each for name, each in self.critic.gradients().items()}
        return found

    def parts(self) -> dict[str, Shard]:
        """See ``PolicyBackend.parts``."""
        found = {
            f"{Path(file).stem}/{name}": part
            for file, parts in self._parts().items()
            for name, part in parts.items()
        }
        for name in self.gradients():
            kind, _, parameter = name.partition("/")
            found[name] = found[("critic/" if kind == "critic_gradient" else "model/") + parameter]
        return found

    def start_from_here(self) -> None:
        """Reinforcement learning starts from the present weights: so do reference and critic."""
        if self.reference is not None:
            own = named_weights(self.reference.model)
            for name, tensor in named_weights(self.completions.model).items():
                local(own[name]).copy_(local(tensor))
        if self.critic is not None:
            self.critic.start_from(self.completions)

    def drop_gradients(self) -> None:
        drop_gradient(self.optimizer)
        if self.critic is not None:
            self.critic.drop_gradient()

    def published(self) -> dict[str, Tensor]:
        """See ``PolicyBackend.weights``: state-dict tensors, detached, in the precision the model computes in.

        On one rank float32 ones are the live weights themselves, and others are copies.
        """
        weights = {}
        for name, tensor in named_weights(self.completions.model).items():
            narrow = self._bfloat16 and tensor.is_floating_point()
            gathered = self.gang.gathered(tensor.to(torch.bfloat16) if narrow else tensor)
            if gathered is not None:
                weights[name] = gathered
        return weights

    # ----------------------------------------------------------------------- files

    def files(self) -> dict[str, Mapping[str, Tensor]]:
        """The live tensors of a saved policy, by the file that they are in."""
        files: dict[str, Mapping[str, Tensor]] = {
            WEIGHTS_FILE: _own_weights(self.completions.model),
            STATE_FILE: moments(self.parameters, self.optimizer),  # all that a bit-equal continuation needs
        }
        if self.reference is not None:
            files[REFERENCE_FILE] = _own_weights(self.reference.model)
        if self.critic is not None:
            files[CRITIC_FILE] = self.critic.state()
        return files

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase, version: int) -> None:
        """See ``PolicyBackend.save``. ``folder`` is created; the weights are written in float32.

        The files are those of one rank: each rank writes its own rows of every tensor, the first one everything else.
        """
        model, first = self.completions.model, self.gang.rank == 0
        folder.mkdir(parents=True, exist_ok=True)
        if first:
            model.config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            write_json(folder / POSITION_FILE, {"format": FORMAT, "version": version})
        parts = self._parts()
        for name, tensors in self.files().items():
            write_tensors(folder / name, tensors, parts[name], first=first)

    def load(self, folder: Path) -> int:
        """See ``PolicyBackend.load``; returns the version. The folder may be of any number of ranks."""
        version = _read_version(folder / POSITION_FILE)
        files, parts = self.files(), self._parts()
        for name, tensors in files.items():
            check_tensors(folder / name, tensors, parts[name])
        for name, tensors in files.items():
            read_tensors_into(folder / name, tensors, parts[name])
        self.drop_gradients()
        return version

    def start_from(self, folder: Path) -> None:
        """See ``PolicyBackend.start_from``."""
        weights, parts = _own_weights(self.completions.model), self._parts()[WEIGHTS_FILE]
        check_tensors(folder / WEIGHTS_FILE, weights, parts)
        read_tensors_into(folder / WEIGHTS_FILE, weights, parts)
        self.start_from_here()

    def _parts(self) -> dict[str, dict[str, Shard]]:
        """This rank's part of every tensor of ``files``."""
        models = {WEIGHTS_FILE: self.completions.model, STATE_FILE: self.completions.model}
        if self.reference is not None:
            models[REFERENCE_FILE] = self.reference.model
        if self.critic is not None:
            models[CRITIC_FILE] = self.critic.model
        files = self.files()
        return {file: self._parts_of(model, files[file]) for file, model in models.items()}

    def _parts_of(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
        """``tensors``: weights of ``model`` and moments of them, by name."""
        weights = named_weights(model) | dict(model.named_parameters())
        parts = {}
        for name, tensor in tensors.items():
            weight = weights[name if name in weights else name.partition(".")[2]]
            parts[name] = self.gang.part(weight) if tensor.dim() else whole(())
        return parts


def _own_weights(model: nn.Module) -> dict[str, Tensor]:
    """The live weights, in a gang this rank's parts of them."""
    return {name: local(tensor) for name, tensor in named_weights(model).items()}


def copy_into(destination: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copies every tensor of ``source`` into that of the same name.

    Raises ``ValueError`` before anything is copied, which names the first difference of names, shapes or dtypes.
    """
    for name in sorted(destination.keys() | source.keys()):
        ours, given = (_outline(tensors.get(name)) for tensors in (destination, source))
        if ours != given:
            raise ValueError(f"tensor {name}: need {ours}, there is {given}")
    with torch.no_grad():
        for name, tensor in destination.items():
            tensor.copy_(source[name])


def _outline(tensor: Tensor | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _shape(setup: PolicySetup) -> tuple[object, ...]:
    recompute = setup.torch_trainer.activation_checkpointing
    return setup.real_model, recompute, setup.loss.critic is None, setup.loss.kl_coefficient == 0.0


def _read_version(path: Path) -> int:
    position = read_json(path)
    if position.get("format") != FORMAT:
        raise CheckpointMismatch(path, "format", str(FORMAT), str(position.get("format")))
    version = position.get("version")
    if type(version) is not int or version < 0:
        raise CheckpointMismatch(path, "version", "a count", repr(version))
    return version
