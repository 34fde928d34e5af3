"""The common parts of OpenAI's APIs: options and their refusal, tokens used, errors."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..answer import Answer
from ..model_call import ApiError
from .api import Body
from .reading import refuse, refuse_other

OPTIONS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
}
"""The keys of a body that are options of a turn, with the names of these."""


def options_of(body: Body, names: Mapping[str, str] = OPTIONS) -> dict[str, Any]:
    """The options of a turn, as ``Agent.generate`` takes them. Raises ApiError for those that change the distribution
    of tokens in a way that no engine of a run has: ignored, they would be believed."""
    refuse(body, "logit_bias", "no engine of a run has biases")
    refuse(body, "top_logprobs", "only the log-probability of the drawn token is known")
    for key in ("frequency_penalty", "presence_penalty"):
        refuse_other(body, key, (0,), "no engine of a run has penalties")
    refuse_other(body, "repetition_penalty", (1,), "no engine of a run has penalties")
    return {name: body[key] for key, name in names.items() if body.get(key) is not None}


def forced_call(choice: Any) -> dict[str, Any]:
    """The option of a turn for a ``tool_choice``. Raises ApiError."""
    match choice:
        case None | "auto" | "none":
            return {}
        case "required":
            return {"must_call": True}
        case {"type": "function", "name": str(name)} if name:
            return {"must_call": name}
    raise ApiError(
        400,
        "tool_choice: needs auto, none, required, or the name of a function",
        code="unsupported",
        parameter="tool_choice",
    )


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """The tokens of a request."""
    prompt = len(answers[0].turn.prompt_tokens)
    completion = sum(len(answer.turn.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def token_name(token: int) -> str:
    """The text of a token among log-probabilities: a worker has no tokenizer."""
    return f"token_id:{token}"


def openai_failure(error: ApiError) -> dict[str, Any]:
    """The body of an error's answer."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.problem,
            "type": kind,
            "param": error.parameter or None,
            "code": error.code,
        }
    }
