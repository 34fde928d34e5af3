"""The errors of OpenAI's APIs."""

from typing import Any

from ..model_call import ApiError


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
