"""One agent answers the questions of train.jsonl, and is rewarded for right answers."""

from flexmarl.actors import Rewards


async def workflow(query, agents):
    answer = await agents["solver"].generate(query.text)
    right = float(answer.text == query.data["answer"])
    return Rewards(solver=right, metrics={"accuracy": right})
