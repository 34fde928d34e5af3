"""Trajectories of a log, as programs write them: checked by the run's configuration, and made of tokens.

    {"agent": "solver", "prompt": "2+2=", "answer": "4", "logprobs": [-0.1, -0.2], "reward": 1.0, "query": "sum-17"}

A line is a trajectory. One of several turns has them as ``turns``, each with the keys of a turn. A prompt becomes
tokens by the code that a rollout's prompt does; lines of the same ``query`` are the group whose rewards are compared.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from ...actors.chat.byte_codec import END_OF_SEQUENCE, ByteCodec
from ...actors.chat.text_codec import TextCodec
from ...actors.columns.declared_columns import outside_reward
from ...actors.errors import InvalidRequest, QueriesRefused
from ...actors.inference.engine_requests import prompt_tokens
from ...actors.messages import (
    GenerateRequest,
    LoggedGroup,
    LoggedTrajectory,
    LoggedTurn,
    Query,
    VersionRange,
)
from ...actors.names import AgentName, PolicyName, Version
from ...actors.rollout.prompts import prompt_parts, segments_and_chat
from ...actors.rollout.turn_options import TurnOptions
from ...actors.workflow import LARGEST_REWARD
from ...core.base.texts import guess, half_problem, listing
from ..config.run_config import RunConfig
from .context_limit import context_limit

_OF_TURN: Final = (
    "agent", "prompt", "prompt_tokens", "tools", "answer", "tokens", "logprobs", "temperature", "version",
    "truncated",
)  # fmt: skip
_OF_LINE: Final = ("query", "reward", "turns")
# Of the rounding of an engine whose answer is certain.
_MOST_LOGPROB: Final = 1e-3


def _name(line: Mapping[str, Any]) -> str:
    """The name of a line without a query: by its contents, so that the same line has the same when it comes again."""
    text = json.dumps(line, sort_keys=True, default=repr)
    return f"log-{xxhash.xxh3_64_hexdigest(text.encode())}"


def _text(trajectories: Mapping[int, LoggedTrajectory]) -> str:
    """The query's text, for people."""
    prompt = next(iter(trajectories.values())).turns[0].prompt
    return str(prompt[-1].get("content") if isinstance(prompt[-1], dict) else prompt[-1]) if prompt else ""


@dataclass(frozen=True, slots=True)
class _PolicyText:
    """``end``: the token that ends an answer. ``vocabulary``: tokens are below it."""

    codec: TextCodec
    end: int | None
    vocabulary: int
    longest: int | None


class LogReader:
    """Keeps the tokenizers that it has loaded. ``needs_origin``: False if answers of other policies may come without
    log-probabilities. Those are trained as if the policy had given them itself when the step begins: with the
    log-probabilities that it has then (SAPO, Amico et al., arXiv 2509.08721)."""

    def __init__(self, config: RunConfig, *, needs_origin: bool = True) -> None:
        self._config, self._needs_origin = config, needs_origin
        self._texts: dict[PolicyName, _PolicyText] = {}

    def groups(self, lines: Sequence[Any]) -> list[LoggedGroup]:
        """The groups of the lines, in the order of their first ones. Raises QueriesRefused with the mistakes by line,
        from 1 on."""
        problems: list[str] = []
        groups: dict[str, dict[int, LoggedTrajectory]] = {}
        for number, line in enumerate(lines, 1):
            try:
                trajectory = self._trajectory(line)
            except ValueError as error:
                problems.append(f"line {number}: {error}")
            else:
                groups.setdefault(line.get("query") or _name(line), {})[number] = trajectory
        problems += () if problems else self._alone(groups.values())
        if problems:
            raise QueriesRefused(f"{len(problems)} of {len(lines)} lines can't be trained{listing(problems)}")
        return [
            LoggedGroup(Query(query, _text(of_query), {"logged": True}), [*of_query.values()])
            for query, of_query in groups.items()
        ]

    def _trajectory(self, line: Any) -> LoggedTrajectory:
        """Raises ValueError."""
        if not isinstance(line, Mapping):
            raise ValueError(f"it is {type(line).__name__}, needs an object with agent, prompt, answer, ...")
        if problem := half_problem(line):
            raise ValueError(problem)
        _refuse_unknown(line, _OF_LINE if "turns" in line else (*_OF_LINE, *_OF_TURN))
        if "query" in line and not (isinstance(line["query"], str) and line["query"]):
            raise ValueError(
                f"query is {line['query']!r:.80}, needs a name, the same for all answers to a query"
            )
        listed = line.get("turns", [{key: line[key] for key in _OF_TURN if key in line}])
        if not isinstance(listed, list) or not listed or not all(isinstance(turn, dict) for turn in listed):
            raise ValueError("turns needs a list of objects, each with agent, prompt, answer, ...")
        for turn in listed:
            _refuse_unknown(turn, _OF_TURN)
        agents = [self._agent(turn) for turn in listed]
        rewards = _rewards(line.get("reward"), agents)
        self._check_turns(agents)
        return LoggedTrajectory(
            [self._turn(agent, turn) for agent, turn in zip(agents, listed, strict=True)], rewards
        )

    def _alone(self, groups: Iterable[Mapping[int, LoggedTrajectory]]) -> list[str]:
        """The mistakes of agents whose rewards are compared, and have none to compare with in their group."""
        problems = []
        for group in groups:
            lines: dict[AgentName, list[int]] = {}
            for number, trajectory in group.items():
                for agent in trajectory.rewards:
                    lines.setdefault(agent, []).append(number)
            for agent, numbers in lines.items():
                credit = self._config.agents[agent].algorithm
                if credit.estimator.compares and len(numbers) == 1:
                    problems.append(
                        f"line {numbers[0]}: {credit.name} compares the rewards of a query's answers, and agent "
                        f"{agent} has one answer: give all answers of a query the same `query`, or set "
                        f"agents.{agent}.algorithm.name to one without a comparison (reinforce_pp, rae, ppo)"
                    )
        return problems

    def _agent(self, turn: Mapping[str, Any]) -> AgentName:
        agent, trained = turn.get("agent"), self._config.trained_agents
        if isinstance(agent, str) and agent in trained:
            return AgentName(agent)
        if agent in self._config.agents:
            raise ValueError(f"agent {agent} is not trained: leave its turns out")
        near = guess(agent, trained) if isinstance(agent, str) else ""
        raise ValueError(f"agent is {agent!r:.80}, the run trains {', '.join(trained)}{near}")

    def _check_turns(self, agents: Sequence[AgentName]) -> None:
        for agent in agents:
            settings = self._config.agents[agent]
            used, column = settings.algorithm.used_rewards, outside_reward(settings.columns)
            of_turns = used == "turn" or (used == "both" and column is not None)
            if of_turns and agents.count(agent) > 1:
                raise ValueError(
                    f"agent {agent} has several turns, each of which has a reward of its own "
                    f"(agents.{agent}.algorithm.rewards={used}), and a line has none: give each turn a line"
                )
            for name, declared in settings.columns.items():
                if declared.required and declared.written_by == "workflow":
                    raise ValueError(
                        f"agents.{agent}.columns.{name} is required of the workflow, and a log has no columns: set "
                        "required=false"
                    )

    # ------------------------------------------------------------------ one turn

    def _turn(self, agent: AgentName, turn: Mapping[str, Any]) -> LoggedTurn:
        name = self._config.agents[agent].policy
        text = self._text_of(name)
        prompt, prompt_tokens = self._prompt(turn, text)
        logprobs, version = turn.get("logprobs"), turn.get("version")
        self._check_origin(name, version, logprobs)
        tokens, answer = self._answer(turn, text, len(logprobs) if isinstance(logprobs, list) else None)
        if text.longest is not None and len(prompt_tokens) + len(tokens) > text.longest:
            raise ValueError(
                f"prompt and answer have {len(prompt_tokens) + len(tokens)} tokens, the model's context has "
                f"{text.longest}"
            )
        temperature = turn.get("temperature", 1.0)
        if not _is_number(temperature) or temperature <= 0:
            raise ValueError(f"temperature is {temperature!r:.80}, needs that of the log-probs, above 0")
        return LoggedTurn(
            agent,
            prompt,
            answer,
            prompt_tokens,
            tokens,
            _logprobs(logprobs, len(tokens)),
            float(temperature),
            None if version is None else Version(version),
        )

    def _check_origin(self, name: PolicyName, version: Any, logprobs: Any) -> None:
        """Raises ValueError if the objective can't train an answer of this origin."""
        loss = self._config.policies[name].algorithm
        if version is None and logprobs is None and self._needs_origin:
            raise ValueError(
                "an answer of another policy needs its `logprobs`, those of its tokens: ask the server for them, or "
                "give the `version` of this run's policy that has generated it"
            )
        is_other = version is None and self._needs_origin
        if is_other and loss.correction == "none" and loss.old_policy != "behaviour":
            raise ValueError(
                f"the answer has no version of this run, and policies.{name}.algorithm.correction=none corrects for no "
                "other policy: set it to tis, icepop or decoupled"
            )
        if logprobs is None and (loss.old_policy == "behaviour" or loss.penalises_rewards):
            which = "old_policy=behaviour" if loss.old_policy == "behaviour" else "kl_in_reward=true"
            raise ValueError(
                f"policies.{name}.algorithm.{which} compares with the log-probs of the answer: give `logprobs`"
            )
        if version is None:
            return
        if self._config.mode != "async":
            raise ValueError(
                f"version is for mode=async, whose max_staleness bounds the age of an answer; under "
                f"mode={self._config.mode} all are of the step's own version: give `logprobs` without a version"
            )
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise ValueError(f"version is {version!r:.80}, needs that of the policy, 0 or more")

    def _prompt(self, turn: Mapping[str, Any], text: _PolicyText) -> tuple[list[Any], tuple[int, ...]]:
        if "prompt_tokens" in turn:
            prompt = turn.get("prompt", [])
            return (prompt if isinstance(prompt, list) else [prompt]), _ids(turn, "prompt_tokens", text)
        if "prompt" not in turn:
            raise ValueError("prompt is missing: text, a list of messages, or `prompt_tokens`")
        parts = prompt_parts(turn["prompt"])
        segments, chat = segments_and_chat(parts, TurnOptions(tools=turn.get("tools", ())))
        request = GenerateRequest(
            "", PolicyName(""), segments, VersionRange.exactly(Version(0)), 0, 1.0, 1, chat=chat
        )
        try:
            return [*parts], prompt_tokens(request, text.codec)
        except InvalidRequest as error:
            raise ValueError(error.problem) from error

    def _answer(
        self, turn: Mapping[str, Any], text: _PolicyText, count: int | None
    ) -> tuple[tuple[int, ...], str]:
        """Tokens and text. ``count``: of the log-probs, None without any: one more than the text's tokens is the end's.
        Without any an answer ends with it, unless it is ``truncated``."""
        answer = turn.get("answer")
        if answer is not None and not isinstance(answer, str):
            raise ValueError(
                f"answer is {answer!r:.80}, needs a text; calls of tools as the model wrote them"
            )
        if "tokens" in turn:
            tokens = _ids(turn, "tokens", text)
            return tokens, text.codec.decode(tokens) if answer is None else answer
        if answer is None:
            raise ValueError("answer is missing: text, or `tokens`")
        tokens = text.codec.encode(answer, False)
        ends = not turn.get("truncated", False) if count is None else count == len(tokens) + 1
        if text.end is not None and ends:
            tokens += (text.end,)
        if not tokens:
            raise ValueError("answer has no token")
        return tokens, answer

    def _text_of(self, name: PolicyName) -> _PolicyText:
        if name not in self._texts:
            policy = self._config.policies[name]
            if (model := policy.used_model) is None:
                self._texts[name] = _PolicyText(
                    ByteCodec("bytes"), END_OF_SEQUENCE, 256, context_limit(policy)
                )
            else:
                # Imported here: transformers takes seconds, and most runs never need it in this process.
                from ...actors.chat.tokenizer_codec import TokenizerCodec
                from ...actors.model_sources import architecture_of, load_tokenizer

                tokenizer = load_tokenizer(model)
                decoder: Any = architecture_of(model).get_text_config(decoder=True)
                self._texts[name] = _PolicyText(
                    TokenizerCodec(tokenizer),
                    tokenizer.eos_token_id,
                    decoder.vocab_size,
                    context_limit(policy),
                )
        return self._texts[name]


def _refuse_unknown(values: Mapping[str, Any], keys: Sequence[str]) -> None:
    if unknown := [key for key in values if key not in keys]:
        raise ValueError(
            f"the unknown key {unknown[0]!r}; known are: {', '.join(keys)}{guess(str(unknown[0]), keys)}"
        )


def _rewards(value: Any, agents: Sequence[AgentName]) -> dict[AgentName, float]:
    by_agent = value if isinstance(value, dict) else dict.fromkeys(agents, value)
    if by_agent.keys() != {*agents}:
        raise ValueError(f"reward has {', '.join(by_agent) or 'no agent'}, needs {', '.join({*agents})}")
    for agent, reward in by_agent.items():
        if not _is_number(reward) or abs(reward) > LARGEST_REWARD:
            raise ValueError(
                f"reward of {agent} is {reward!r:.80}, needs a finite number, at most {LARGEST_REWARD:g}"
            )
    return {AgentName(agent): float(reward) for agent, reward in by_agent.items()}


def _logprobs(value: Any, count: int) -> tuple[float, ...]:
    if value is None:
        return (math.nan,) * count
    if not isinstance(value, list) or not all(
        _is_number(logprob) and logprob <= _MOST_LOGPROB for logprob in value
    ):
        raise ValueError(
            "logprobs needs a list of finite numbers, 0 at most, one for each token of the answer"
        )
    if len(value) != count:
        raise ValueError(
            f"logprobs has {len(value)} numbers, and the answer has {count} tokens by this run's tokenizer: give the "
            "very ids as `tokens`, with `prompt_tokens`"
        )
    return tuple(float(logprob) for logprob in value)


def _ids(turn: Mapping[str, Any], key: str, text: _PolicyText) -> tuple[int, ...]:
    ids = turn[key]
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{key} is {ids!r:.80}, needs a list of token ids")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < text.vocabulary:
            raise ValueError(f"{key} has {token!r:.80}, needs ids of 0 to {text.vocabulary - 1}")
    return tuple(ids)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
