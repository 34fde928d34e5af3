"""The arguments of vLLM for an engine of a config, and the folder that vLLM reads the model's architecture from."""

import uuid
from pathlib import Path
from typing import Any, Final

import xxhash
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from vllm import envs
from vllm.config import StructuredOutputsConfig, WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from ...messages import ModelConfig
from ..inference_config import VllmEngineConfig
from ..instance_setup import ServedBase
from .vllm_adapters import base_source, lora_arguments
from .vllm_memory import UTILIZATION
from .vllm_weights import BACKEND, WorkerExtension

_WHOLE: Final[dict[str, Any]] = {
    "load_format": "dummy",
    "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
}


def engine_arguments(
    outline: PreTrainedModel,
    options: VllmEngineConfig,
    folder: str,
    base: tuple[ModelConfig, ServedBase] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    records_routes: bool = False,
) -> EngineArgs:
    """Those of an engine with the weights of ``base`` and room for adapters over it, or with random weights: then vLLM
    reads the architecture alone, and no weights from a disk or a hub. ``folder``: for files that end with the engine.
    ``tokenizer``: for grammars alone, since requests are tokens. ``records_routes``: results have the experts of their
    tokens.
    """
    if base is None:
        outline.config.architectures = [type(outline).__name__]
        outline.config.save_pretrained(folder)
        source, arguments = stable_folder(folder), _WHOLE
    else:
        source, arguments = base_source(*base, folder), lora_arguments(base[1])
    return EngineArgs(
        model=source,
        **_tokenizer_arguments(tokenizer, outline, folder),
        generation_config="vllm",  # no limits of a model's own
        dtype=str(outline.dtype).removeprefix("torch."),
        max_model_len=options.max_context,
        max_num_seqs=options.max_batch,
        kv_cache_memory_bytes=options.kv_cache_bytes,
        gpu_memory_utilization=UTILIZATION,
        enable_prefix_caching=options.prefix_reuse,
        # vLLM draws a token behind a part of a prompt, too, and drops it: then it sets the request's random numbers
        # back, which torch can't on a CPU, and the engine dies. There a prompt that does not fit into the tokens
        # that a step has left waits for the next step. A step takes a prompt of max_model_len in any case.
        enable_chunked_prefill=False if current_platform.is_cpu() else None,
        enforce_eager=options.enforce_eager or current_platform.is_cpu(),
        async_scheduling=options.async_scheduling,
        tensor_parallel_size=options.tensor_parallel,
        distributed_executor_backend=_one_process(folder) if options.tensor_parallel == 1 else "mp",
        logprobs_mode="processed_logprobs",  # of the distribution that the token was drawn from
        disable_log_stats=True,
        enable_return_routed_experts=records_routes,
        worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        **arguments,
        **options.options,
    )


def _tokenizer_arguments(
    tokenizer: PreTrainedTokenizerBase | None, outline: PreTrainedModel, folder: str
) -> dict[str, Any]:
    if tokenizer is None:
        return {"skip_tokenizer_init": True}
    source = Path(folder) / "tokenizer"
    tokenizer.save_pretrained(source)
    outline.config.save_pretrained(source)  # vLLM looks for it there, twice, with a pause
    # The only one of vLLM's libraries that refuses what it can't hold an answer to, before the request is under way.
    grammars = StructuredOutputsConfig(backend="xgrammar")
    return {"tokenizer": str(source), "tokenizer_mode": "hf", "structured_outputs_config": grammars}


def stable_folder(folder: str) -> str:
    """A folder with the ``config.json`` of ``folder``, in vLLM's cache: its name is the same at every start. ``folder``
    itself if the cache can't be written."""
    # The path of the model is a part of the key of vLLM's compiled code (``ModelConfig.compute_hash``). With a folder
    # that ends with the engine, each start would compile again and leave another folder in the cache. The file stays
    # there, like the code: other engines may be reading it, and it has some 1000 bytes.
    config = (Path(folder) / "config.json").read_bytes()
    stable = Path(envs.VLLM_CACHE_ROOT) / "flexmarl" / xxhash.xxh3_128_hexdigest(config)
    try:
        stable.mkdir(parents=True, exist_ok=True)
        if not (file := stable / "config.json").exists():
            draft = stable / f".{uuid.uuid4().hex}"  # several engines may start at once
            draft.write_bytes(config)
            draft.replace(file)
    except OSError:
        return folder
    return str(stable)


def _one_process(folder: str) -> type[UniProcExecutor]:
    """An executor that keeps the file of vLLM's process group in ``folder``, which ends with the engine. In vLLM's
    place, the folder for temporary files, it stays if the process is killed, and if anything still refers to the
    group."""

    class OneProcess(UniProcExecutor):  # type: ignore[misc]  # vLLM is not checked
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"file://{folder}/process-group", *super()._distributed_args()[1:]

    return OneProcess
