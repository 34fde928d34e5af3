"""The experts that vLLM has recorded for a request (``enable_return_routed_experts``)."""

from typing import Any

import numpy as np

from ...expert_routes import Routes, narrow


def routes_of_part(llm: Any, part: Any) -> Routes | None:
    """The routes of a request that has ended, from its last output; None if ``llm`` records none."""
    return None if part.routed_experts is None else _narrow(llm, part.routed_experts)


def routes_so_far(llm: Any, name: str, tokens: int) -> Routes | None:
    """The routes of a request that is about to be aborted, of the first ``tokens`` tokens of prompt and answer; None if
    ``llm`` has not recorded all of them."""
    # vLLM joins the pieces when it ends a request itself. One that a stop string or new weights end is aborted, and an
    # abort drops them.
    processor = llm.output_processor
    names = processor.external_req_ids.get(name, ())
    pieces = [piece for inner in names for piece in processor.request_states[inner].routed_experts_chunks]
    rows = np.concatenate(pieces)[:tokens] if pieces else None
    return None if rows is None or len(rows) < tokens else _narrow(llm, rows)


def _narrow(llm: Any, rows: Any) -> Routes:
    return narrow(rows, llm.model_config.get_num_experts())
