"""The text of a span, for a line in its rectangle."""

from ....actors.spans import Span


def label_of(span: Span) -> str:
    """A few words: agent and turn, policy and version, number of the step."""
    where = f"{span.query} #{span.trajectory}" if span.trajectory >= 0 else span.query
    match span.kind:
        case "step" | "evaluation" | "checkpoint":
            return f"{span.kind} {span.step}" if span.step >= 0 else span.kind
        case "trajectory" | "environment":
            return where
        case "turn" | "wait" | "generate" | "prefill" | "decode" | "sample":
            return " · ".join(filter(None, (span.agent or span.policy, f"{where} turn {span.turn}")))
        case "move":
            return span.note
        case "micro_batch" | "lease":
            return " · ".join(
                filter(None, (span.policy, f"{span.tokens} tokens" if span.tokens >= 0 else ""))
            )
    return f"{span.policy} v{span.version}" if span.version >= 0 else span.policy or span.kind
