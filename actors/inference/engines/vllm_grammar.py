"""The forms of an answer as vLLM takes them: a structural tag of xgrammar.

vLLM masks the logits of tokens that no answer of these forms can continue with, before all else: so its
log-probabilities are those of the masked distribution, the raw as the processed ones.
"""

import json
from typing import Any

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

from ...errors import InvalidRequest
from .engine import AnswerForm, EngineRequest


def grammar_of(request: EngineRequest) -> StructuredOutputsParams | None:
    """None if the answer may be anything. Raises InvalidRequest for a schema of which xgrammar would ignore a part,
    and for one that is nested too deeply."""
    if not request.forms:
        return None
    try:
        elements = [_element(request.request_id, form) for form in request.forms]
        tag = elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
        text = json.dumps({"type": "structural_tag", "format": tag})
    except RecursionError:
        raise InvalidRequest(request.request_id, "a JSON schema is nested too deeply") from None
    return StructuredOutputsParams(structural_tag=text)


def _element(name: str, form: AnswerForm) -> dict[str, Any]:
    schema = json.loads(form.schema)
    if has_xgrammar_unsupported_json_features(schema):
        raise InvalidRequest(
            name, f"a JSON schema has a key that vLLM's xgrammar can't hold an answer to: {form.schema:.200}"
        )
    content = {"type": "json_schema", "json_schema": schema}
    if not form.begin and not form.end:
        return content
    return {"type": "tag", "begin": form.begin, "content": content, "end": form.end}
