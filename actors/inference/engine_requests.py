"""A turn's request as its engine sees it, and the engine's result as the answer to it. Pure."""

from ..errors import TurnAborted
from ..messages import GenerateRequest, Generation
from .engines.engine import EngineRequest, EngineResult


def engine_request(request: GenerateRequest, prompt: tuple[int, ...]) -> EngineRequest:
    """What an instance asks of its engine, ``prompt`` being the tokens of ``request.prompt``. Raises InvalidRequest."""
    resumed_tokens = len(request.completion)
    return EngineRequest(
        request.sample_id,
        prompt + request.completion,
        request.seed,
        request.temperature,
        request.max_new_tokens - resumed_tokens,
        resumed_tokens,
    )


def generation_of(
    request: GenerateRequest, prompt: tuple[int, ...], result: EngineResult, text: str
) -> Generation:
    """An instance's answer. Raises TurnAborted where the turn was interrupted and may not be carried on."""
    if result.finish_reason == "interrupted" and not request.resumable:
        raise TurnAborted(f"turn {request.sample_id} was dropped for new weights")
    return Generation(
        text, prompt, result.tokens, result.logprobs, request.policy_version, result.finish_reason
    )
