"""Agents behind an endpoint with the OpenAI API: in the config, and in a run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from starlette.responses import PlainTextResponse

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.names import PolicyName
from flexmarl.launch.config.config_reading import check, resolve, to_yaml
from flexmarl.launch.config.run_config import RunConfig

from ..openai_endpoint import Endpoint, served_endpoint
from .in_process import RunsHere

RECIPE = Path(__file__).parent / "recipes" / "self_play"
RIVAL = PolicyName("rival")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with served_endpoint() as endpoint:
        yield endpoint


def behind(base_url: str, more: str = "") -> str:
    return f"agents.rival.engine={{name: openai, base_url: '{base_url}', model: large, retries: 0{more}}}"


def game(*settings: str) -> RunConfig:
    return resolve(str(RECIPE), [behind("http://there/v1"), *settings])


def test_the_defaults_of_models_and_engines_are_not_for_it() -> None:
    config = game()
    policy = config.policies[RIVAL]
    assert (policy.engine.name, policy.engine.max_batch, policy.model) == ("openai", 64, None)
    assert policy.tokenizer == "bytes" and config.simulated, "only the player is trained"
    assert check(yaml.safe_load(to_yaml(config)), "again") == config


def test_agents_may_share_one_in_the_section_policies() -> None:
    engine = "{name: openai, base_url: 'http://there/v1', model: large}"
    config = resolve(
        str(RECIPE),
        [f"policies={{house: {{train: false, engine: {engine}}}}}", "agents.rival={policy: house}"],
    )
    assert config.policies[PolicyName("house")].engine.name == "openai"


@pytest.mark.parametrize(
    ("setting", "refused"),
    [
        ("agents.rival.train=true", r"agents\.rival: engine\.name=openai: an endpoint is never trained"),
        ("agents.rival.model.path=some/model", r"agents\.rival: model: .*the endpoint has the weights"),
        ("deterministic=true", r"engine\.name=openai draws other tokens for the same seed"),
        ("agents.rival.engine.base_url=there", r"base_url.*must begin with http"),
    ],
)
def test_settings_that_an_endpoint_rules_out_are_refused(setting: str, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        game(setting)


def test_an_agent_behind_an_endpoint_plays(runs_here: RunsHere, endpoint: Endpoint) -> None:
    run = runs_here.train("endpoint", behind(endpoint.base_url), recipe=RECIPE)
    assert run.status == 0, run.text
    steps = run.metrics
    assert [step["turns/rival"] for step in steps] == [6, 6, 6]
    training = [body for _, body, _ in endpoint.requests if body["prompt"].startswith("task")]
    assert len(training) == 18 and {body["max_tokens"] for body in training} == {16}


def test_an_endpoint_that_refuses_fails_the_trajectory_by_name(
    runs_here: RunsHere, endpoint: Endpoint
) -> None:
    endpoint.answers = [PlainTextResponse("no such model", 404)] * 100
    run = runs_here.train("refused", behind(endpoint.base_url), recipe=RECIPE)
    assert run.status != 0
    assert f"EndpointFailed: the endpoint {endpoint.base_url}/completions: status 404" in run.text
