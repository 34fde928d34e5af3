"""The supervised batches of a policy: the shares of its agents, and their examples as tokens. Pure."""

from collections.abc import Iterator, Sequence

from ...chat.conversation import Conversation, Row, conversation_rows
from ...chat.text_codec import TextCodec
from ...errors import RecipeError
from ...names import AgentName
from ...recipe.recipe import Recipe


def sft_rows(
    recipe: Recipe, agent: AgentName, batch: int, size: int, codec: TextCodec, end: int
) -> Iterator[Row]:
    """The rows of the agent's ``size`` examples in a supervised batch: one of a pair of texts, one of each answer of a
    conversation. Raises RecipeError for an example that the chat template can't show."""
    for number, example in enumerate(recipe.sft(agent, batch, size)):
        if not isinstance(example, Conversation):
            prompt, completion = example
            yield codec.encode(prompt, True), (*codec.encode(completion, False), end)
            continue
        try:
            yield from conversation_rows(example, codec, end)
        except ValueError as error:
            raise RecipeError(
                f"{recipe.file.name}: sft gives example {number} of batch {batch} for agent {agent}: {error}"
            ) from error


def sft_shares(agents: Sequence[AgentName], size: int, batch: int) -> dict[AgentName, int]:
    """Examples of each agent in a supervised batch of ``size``: equal shares, agents without an example left out.

    Examples that are left over go to one agent each, to others in the next batch, so that over the batches all agents
    have as many.
    """
    share, left_over = divmod(size, len(agents))
    first = batch * left_over
    counts = {
        agent: share + ((number - first) % len(agents) < left_over) for number, agent in enumerate(agents)
    }
    return {agent: count for agent, count in counts.items() if count}
