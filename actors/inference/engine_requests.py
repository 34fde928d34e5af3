"""Translates a turn's request into an engine's, and the engine's result into the turn's answer. Pure."""

from ..errors import TurnAborted
from ..messages import GenerateRequest, Generation
from .engines.engine import EngineRequest, EngineResult


def engine_request(request: GenerateRequest, prompt: tuple[int, ...]) -> EngineRequest:
    """The engine's request for a turn whose ``request.prompt`` has the tokens ``prompt``.

    Raises InvalidRequest if no engine can serve it.
    """
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
    """The answer to a turn's request. Raises TurnAborted if the turn was interrupted and is not resumable."""
    if result.finish_reason == "interrupted" and not request.resumable:
        raise TurnAborted(request.sample_id)
    return Generation(
        text, prompt, result.tokens, result.logprobs, request.policy_version, result.finish_reason
    )
