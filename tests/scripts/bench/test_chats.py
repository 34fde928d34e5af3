"""``scripts/bench/run chats`` with times too short for its figures: every reward is accounted for."""

from scripts.bench.chats import GOALS, Options, measure, tables

from ...bench_tables import drawn

_FAST = ("agents.assistant.engine.token_s=1.0e-4", "agents.assistant.trainer.optimizer_s=0.05")


async def test_every_chat_is_answered_and_each_reward_trained_or_late() -> None:
    reported: list[str] = []
    options = Options(chats=6, reward_s=1.0, spread_s=0.5, overrides=_FAST)
    result = await measure(options, reported.append)
    assert (result["twice"], result["unaccounted"]) == (0, 0)
    assert result["trained"] + result["late"] == 6 * 4 and 0 < result["p50_ms"] <= result["max_ms"]
    assert [goal["key"] for goal in result["goals"]] == [goal.key for goal in GOALS]
    assert "steps meanwhile" in drawn(tables, result)
    assert reported[-1] == "6 chats, with rewards after 0 to 1 s"
