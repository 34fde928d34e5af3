"""A scout asks a tool for the price of a thing, and a bidder says what it costs, in one conversation:

user    figs 6        (the thing, and the last bid)
scout   <tool_call>{"name": "price", "arguments": {"thing": "figs"}}</tool_call>
tool    4
bidder  6             (the larger of both)
"""

from random import Random

from flexmarl.actors import Rewards

PRICES = {"figs": 4, "nuts": 7, "pears": 2, "plums": 5}
CALL = '<tool_call>{{"name": "price", "arguments": {{"thing": "{}"}}}}</tool_call>'


async def price(thing: str) -> str:
    """The price of a thing."""
    return str(PRICES[thing]) if thing in PRICES else "error"


async def workflow(query, agents):
    question = {"role": "user", "content": query.text}
    turn = await agents["scout"].generate([question], tools=[price])
    things = [call.arguments["thing"] for call in turn.tool_calls if not call.error]
    result = await price(things[0]) if things else "error"
    bid = await agents["bidder"].generate([turn, {"role": "tool", "content": result}], tools=[price])
    called = float(things == [query.data["thing"]])
    right = float(bid.text == max(result, query.text[-1]))  # by the result that the bidder has seen
    return Rewards(scout=called, bidder=right, metrics={"accuracy": called * right})


def sft(agent, batch, size, seed, **data):
    """Conversations that teach the form of a call and of a bid: any thing, any number."""
    random = Random(f"{seed} {agent} {batch}")
    return [example(agent, random) for _ in range(size)]


def example(agent, random):
    thing, called = random.choice([*PRICES]), random.choice([*PRICES])
    messages = [
        {"role": "user", "content": f"{thing} {random.randrange(10)}"},
        {"role": "assistant", "content": CALL.format(called)},
    ]
    if agent == "bidder":
        messages += [
            {"role": "tool", "content": str(PRICES[called])},
            {"role": "assistant", "content": str(random.randrange(10))},
        ]
    return {"messages": messages, "tools": [price]}
