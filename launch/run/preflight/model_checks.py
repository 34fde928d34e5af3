"""Tries the models' configs, tokenizers and devices, without their weights.

The hub is asked once for each model, with a limit of a few seconds: the libraries' own attempts take minutes if it
can't be reached.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from ....actors.messages import ModelConfig
from ....actors.model_sources import architecture_of, load_tokenizer, misspelt_keys, routes_to_experts
from ....actors.names import PolicyName
from ....core.base.texts import text_of
from ...config.run_config import RunConfig
from ...hosts.cuda_build import driver_problem
from ...hosts.nvidia import read_devices
from ..context_limit import context_limit
from .chat_checks import chat_problem, chat_warnings
from .recipe_checks import mentions

_HUB_TIMEOUT_S = 5.0
_ERROR_COLUMNS = 200
_EXPERTS = (
    "policy {policy}: its model is a mixture of experts (MoE). If two experts score nearly the same, rounding has "
    "the engine and the trainer choose different ones, and their probabilities of a token differ by more than "
    "rounding. model.router_replay=true has the trainer take the engine's choices, if its routers can be replayed; "
    "else watch ratio_deviation: algorithm.correction=icepop leaves such tokens out"
)
"""A mismatch between engine and trainer that routing adds."""
_NOT_PROVEN = (
    ". weights.probe_bound may have to be larger, or an instance is given up for such a choice: the engine {engine} "
    "can't take the trainer's"
)
_MISSPELT = "policy {policy}: the model computes as without {key} in model.config; do you mean {near}?"
_NO_EXPERTS = "the model has no experts whose choice could be replayed: leave router_replay out"
_NOT_REPLAYED = (
    "{problem}: leave router_replay out. algorithm.correction=icepop leaves out the tokens whose probability another "
    "choice of experts changes much"
)
_NO_TOKENIZER = (
    "it holds no tokenizer, so that every prompt would be empty: copy tokenizer.json and tokenizer_config.json there, "
    "or name another folder or a hub name in model.tokenizer"
)
_WEIGHTS = ("*.safetensors", "*.bin")
_TOOLS = re.compile(r"\btools\b")
_MESSAGES = re.compile(r"""\btools\b|["']role["']""")


@dataclass
class ModelProblem:
    """A mistake in ``policies.<policy>.model.<part>``; ``text`` has neither the key nor the value."""

    policy: str
    part: str
    value: str
    text: str


@dataclass
class ModelFindings:
    """``cached``: the hub can't be reached, and all that is needed is in its cache. ``warnings``: stop no run."""

    problems: list[ModelProblem] = field(default_factory=list)
    cached: bool = False
    warnings: list[str] = field(default_factory=list)


def device_problems(config: RunConfig) -> Iterator[ModelProblem]:
    """Policies on CUDA if PyTorch can't use it here. Imports torch if there is one to look for. The devices themselves
    are counted by the placement."""
    devices = {
        name: model.device
        for name, policy in config.policies.items()
        if (model := policy.used_model) is not None and model.device != "cpu"
    }
    if not devices:
        return
    import torch

    if not torch.cuda.is_available():
        reason = no_cuda_reason(torch.__version__, torch.version.cuda, read_devices().driver)
        for name, device in devices.items():
            yield ModelProblem(
                name, "device", device, f"PyTorch finds no CUDA device here{reason}; device=cpu needs none"
            )


def no_cuda_reason(torch_version: str, cuda: str | None, driver: str) -> str:
    """The reason for which PyTorch has no CUDA, behind a colon; empty if it is unknown. ``cuda``: the version that
    it is built for; ``driver``: the version of NVIDIA's; empty without it."""
    if cuda is None:
        return f": {torch_version} is built without CUDA, install a build with it"
    problem = driver_problem(cuda, driver)
    return f": {problem}" if problem else ""


def model_findings(config: RunConfig) -> ModelFindings:
    """Tries each model once, also if several policies have it. Imports torch if a policy replays routes."""
    findings = ModelFindings()
    tried: dict[str, _CanNotLoad | None] = {}
    folder = Path(config.recipe)
    # Which agents get tools is known only while the code runs.
    has_tools, has_messages = mentions(folder, _TOOLS), mentions(folder, _MESSAGES)
    for name, policy in config.policies.items():
        model = policy.used_model
        if model is None:
            continue
        key = model.model_dump_json()
        if key not in tried:
            tried[key] = None
            try:
                cached = _try(model)
            except _CanNotLoad as error:
                tried[key] = error
            else:
                findings.cached |= cached
                if has_messages or model.renderer not in ("auto", "template"):
                    tokenizer = load_tokenizer(model, local_files_only=cached)
                    warnings = chat_warnings(name, model, tokenizer, has_tools=has_tools)
                    if (text := chat_problem(model, tokenizer)) is not None:
                        tried[key], warnings = _CanNotLoad("renderer", model.renderer, text), iter(())
                    findings.warnings += warnings
        if (problem := tried[key]) is not None:
            findings.problems.append(ModelProblem(name, problem.part, problem.value, problem.text))
            continue
        findings.warnings += [
            _MISSPELT.format(policy=name, key=key, near=near) for key, near in misspelt_keys(model).items()
        ]
        if (too_long := _context_problem(config, name)) is not None:
            findings.problems.append(too_long)
        elif policy.replays_routes and (text := _replay_problem(model, findings.cached)):
            findings.problems.append(ModelProblem(name, "router_replay", "true", text))
        elif policy.train and not model.router_replay and _has_experts(model, findings.cached):
            of_proof = "" if policy.engine.replays_experts else _NOT_PROVEN.format(engine=policy.engine.name)
            findings.warnings.append(_EXPERTS.format(policy=name) + of_proof)
    return findings


def _has_experts(model: ModelConfig, cached: bool) -> bool:
    return routes_to_experts(architecture_of(model, local_files_only=cached))


def _replay_problem(model: ModelConfig, cached: bool) -> str:
    """The reason for which the experts of ``model`` can't be replayed, by its config; empty if they can."""
    if not _has_experts(model, cached):
        return _NO_EXPERTS
    from ....actors.errors import UnsupportedModel
    from ....actors.pretrained import outline_of
    from ....actors.routers import try_routers

    try:
        try_routers(outline_of(model, local_files_only=cached))
    except UnsupportedModel as error:
        return _NOT_REPLAYED.format(problem=error)
    return ""


class _CanNotLoad(Exception):
    def __init__(self, part: str, value: str, text: str) -> None:
        super().__init__(text)
        self.part, self.value, self.text = part, value, text


def _try(model: ModelConfig) -> bool:
    """Returns True if the hub's cache stands in for the hub. Raises _CanNotLoad for the first mistake."""
    cached = False
    for part, source in (("path", model.path), ("tokenizer", model.tokenizer)):
        if source is not None and not Path(source).exists():
            try:
                cached |= _only_cached(source, weights=part == "path")
            except _NotThere as error:
                raise _CanNotLoad(part, source, f"there is no such folder, and {error}") from None
    if model.path is not None and Path(model.path).is_dir() and not _has_weights(Path(model.path)):
        raise _CanNotLoad("path", model.path, f"the folder holds no weights ({', '.join(_WEIGHTS)})")
    try:
        architecture_of(model, local_files_only=cached)
    except Exception as error:  # noqa: BLE001  # a library's: any error of it means that the model can't be loaded
        part, source = "path", model.path
        if source is None:
            part, source = "config.model_type", str((model.config or {})["model_type"])
        raise _CanNotLoad(part, source, f"the model's config can't be loaded: {_words(error)}") from None
    try:
        tokenizer = load_tokenizer(model, local_files_only=cached)
    except Exception as error:  # noqa: BLE001  # as above
        part = "path" if model.tokenizer is None else "tokenizer"
        text = f"the tokenizer can't be loaded: {_words(error)}"
        raise _CanNotLoad(part, model.tokenizer_source, text) from None
    # Without files transformers makes a tokenizer that has special tokens alone.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        part = "path" if model.tokenizer is None else "tokenizer"
        raise _CanNotLoad(part, model.tokenizer_source, _NO_TOKENIZER)
    if sys.modules.get("torch") is not None:  # else it takes seconds, and a tiny run fails within as many
        _try_outline(model, cached)
    return cached


def _try_outline(model: ModelConfig, cached: bool) -> None:
    """Raises _CanNotLoad for a model that transformers can't build, or not with the attention that is computed here."""
    from ....actors.pretrained import outline_of

    try:
        outline_of(model, local_files_only=cached)
    except Exception as error:  # noqa: BLE001  # a library's, as above
        part = "path" if model.path is not None else "config.model_type"
        source = model.path or str((model.config or {})["model_type"])
        raise _CanNotLoad(part, source, f"the model can't be built: {_words(error)}") from None


def _context_problem(config: RunConfig, policy: PolicyName) -> ModelProblem | None:
    """The refusal of sequences that are longer than a model's."""
    engine = config.policies[policy].engine
    if engine.max_context is None:
        return None
    unlimited = engine.model_copy(update={"max_context": None})
    limit = context_limit(config.policies[policy].model_copy(update={"engine": unlimited}))
    if limit is None or engine.max_context <= limit:
        return None
    model = config.policies[policy].real_model
    part = "path" if model.path is not None else "config"
    value = model.path or str((model.config or {})["model_type"])
    text = f"engine.max_context={engine.max_context} is more than the {limit} positions that the model has"
    return ModelProblem(policy, part, value, text)


class _NotThere(Exception):
    """The hub does not give a model."""


def _only_cached(name: str, *, weights: bool) -> bool:
    """Asks the hub for its model ``name``: False if it has it, True if it can't be asked and the cache has all files.
    Raises _NotThere if neither has it."""
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except HFValidationError:
        raise _NotThere("the hub has no names like this") from None
    except GatedRepoError:
        raise _NotThere("the hub asks you to accept the model's terms first, and to set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise _NotThere(f"{constants.ENDPOINT} has no such model, or it is private (set HF_TOKEN)") from None
    except Exception as error:  # noqa: BLE001  # of the HTTP library
        if _is_cached(name, weights=weights):
            return True
        if isinstance(error, OfflineModeIsEnabled):
            raise _NotThere("it is not in the hub's cache; HF_HUB_OFFLINE forbids a download") from None
        raise _NotThere(f"the hub {constants.ENDPOINT} can't be reached ({_words(error)})") from None
    return False


def _is_cached(name: str, *, weights: bool) -> bool:
    file = "config.json" if weights else "tokenizer_config.json"
    cached_file = try_to_load_from_cache(name, file)
    if not isinstance(cached_file, str):
        return False
    return not weights or _has_weights(Path(cached_file).parent)


def _has_weights(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in _WEIGHTS)


def _words(error: BaseException) -> str:
    # Some texts list all models of the library; some have the reason in their second line.
    first = " ".join(text_of(error).strip().splitlines()[:2])
    return f"{type(error).__name__}: {textwrap.shorten(first, _ERROR_COLUMNS, placeholder=' ...')}"
