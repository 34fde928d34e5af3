"""The least seconds of a turn: those of an engine that is full."""

import pytest

from flexmarl.actors.inference.engine_times import RooflineTimes
from flexmarl.actors.inference.engines.engine import EngineRequest
from flexmarl.actors.inference.engines.simulated_step_engine import SimulatedStepEngine
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.launch.simulate.planning.step_bound import PolicyWork

APART = RooflineTimes(
    step_s=0.25, weights_s=1.0, token_s=0.125, context_token_s=0.0, pair_s=0.0, chunk_tokens=512, kv_tokens=10_000,
    prompts_apart=True, chunk_s=0.5,
)  # fmt: skip
TURNS, PROMPT, ANSWER = 16, 20, 3


@pytest.mark.parametrize("computed", [1.0, 0.25])
def test_a_full_engine_takes_the_least_seconds_of_its_turns(computed: float) -> None:
    work = PolicyWork(TURNS, PROMPT, ANSWER, TURNS, True, computed)
    now_s = 0.0
    config = SimulatedEngineConfig(
        max_batch=TURNS, median_tokens=1e6, sigma=0.0, times=APART, computed_share=computed
    )
    engine = SimulatedStepEngine(config, lambda: now_s)
    for number in range(TURNS):
        engine.add(EngineRequest(str(number), (97,) * PROMPT, number, 1.0, ANSWER))
    while engine.pending:
        now_s = max(now_s, engine.due_s)
        engine.step()
    assert TURNS * work.turn_s(APART, TURNS) == pytest.approx(now_s)
