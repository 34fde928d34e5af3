"""``flexmarl samples``."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from flexmarl.actors.demonstrations.demonstration import Demonstration, read_demonstrations
from flexmarl.actors.recorded_trajectory import RecordedTurn
from flexmarl.launch.cli.main import main
from flexmarl.launch.config.config_reading import resolve, to_yaml
from flexmarl.launch.run_folder.samples.conversation import show, style_of
from flexmarl.launch.run_folder.samples.sample_file import SampleFile

from ..conftest import SIMULATED_POLICIES, TINY
from ..run_folder.samples.files import NO_LIMIT, compared, record, recorded_run, trajectory

RECORDS = [
    record(
        trajectory(1, 1, 0, 0.25), trajectory(1, 1, 1, 0.75), trajectory(1, 1, 2, failure="ValueError: x")
    ),
    record(trajectory(2, 3, 0, 0.5, evaluation=True)),
]
Flexmarl = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = to_yaml(resolve(str(TINY), [*SIMULATED_POLICIES]))
    return recorded_run(tmp_path_factory.mktemp("runs") / "run", RECORDS, config).path


@pytest.fixture
def flexmarl(capsys: pytest.CaptureFixture[str], run: Path) -> Flexmarl:
    """Status, standard output, standard error."""

    def command(*words: str) -> tuple[int, str, str]:
        return (main(["samples", str(run), *words]), *capsys.readouterr())

    return command


def test_a_conversation_has_prompts_answers_and_figures(flexmarl: Flexmarl) -> None:
    status, out, err = flexmarl("--best", "1", "--agent", "solver", "--training")
    assert status == 0 and not err
    lines = [line.rstrip("─ ") for line in out.splitlines()]
    assert lines[0] == "step 1 · query q1 · trajectory 1 · solver 0.75, judge 0.25"
    assert lines[1:] == [
        "accuracy 0.75",
        "  1+2=",
        "solver  turn 0 · reward 0.75 · advantage +0.25 · version 1 · 2 tokens, mean log-prob -0.255",
        "  4",
        "  ↑ the conversation of turn 0",
        "  ?",
        "judge  turn 1 · reward 0.25 · advantage -0.25 · version 1 · 1 tokens, mean log-prob -1.5"
        " · cut off at max_new_tokens",
        "  no",
        "",
        "1 of 2 trajectories",
    ]


def test_failures_are_shown_with_what_had_ended(flexmarl: Flexmarl) -> None:
    _, out, _ = flexmarl("--failed")
    assert "failed: ValueError: x" in out and "no reward" in out and out.endswith("1 of 1 trajectory\n")


def test_tokens_have_their_log_probabilities(flexmarl: Flexmarl) -> None:
    _, out, _ = flexmarl("--evaluation", "--tokens")
    assert "  4[-0.50] \\x02[-0.01]" in out and "evaluation after step 2" in out


def test_json_is_an_object_a_trajectory(flexmarl: Flexmarl) -> None:
    _, out, _ = flexmarl("--worst", "2", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["rewards"]["solver"] for one in found] == [0.25, 0.75]
    assert found[0]["turns"][0]["text"] == "4" and found[0]["turns"][0]["tokens"] == 2
    _, out, _ = flexmarl("--evaluation", "--json", "--tokens")
    assert json.loads(out)["turns"][1]["logprobs"] == [-1.5]


def test_a_list_has_a_line_for_each_turn(flexmarl: Flexmarl) -> None:
    _, out, _ = flexmarl("--list", "--agent", "judge")
    assert out.count("judge") == 3 and out.endswith("3 turns, of 3 trajectories\n")
    _, out, _ = flexmarl("--list", "--json", "--reward", "<0.3")
    assert [json.loads(line)["reward"] for line in out.splitlines()] == [0.25, 0.25]


def test_an_empty_result_is_explained(flexmarl: Flexmarl) -> None:
    status, out, _ = flexmarl("--reward", ">5", "--training")
    assert status == 0
    assert out == (
        "none of 4 trajectories fits reward=>5, evaluation=false; recorded are steps 1 to 1, evaluations after step 2\n"
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--reward", "low"], "'low' is not a condition: write 12, '<0.2'"),
        (["--best", "1", "--worst", "1"], "exclude each other"),
        (["--list", "--differences"], "no --best, --worst, --tokens or --differences"),
        (["--list", "--tokens"], "no --best, --worst, --tokens or --differences"),
        (["--best", "1", "--failed"], "--failed takes no --best or --worst"),
        (["--best", "0"], "0 is not in the range"),
        (["--success", ">0"], "--success chooses demonstrations: give --as-demonstrations FILE too"),
        (["--as-demonstrations", "x", "--success", "good"], "'good' is not a condition: write 'reward>=1'"),
        (["--as-demonstrations", "x", "--best", "1"], "has no use for --best: choose by --success"),
        (["--as-demonstrations", "x", "--json"], "has no use for --json"),
        (["--as-demonstrations", __file__], "exists: name a new file, or remove it"),
        (
            ["--as-demonstrations", "x"],
            "has reward >= 1: their reward is 0.5 to 0.5; choose another --success",
        ),
        (
            ["--as-demonstrations", "x", "--success", "score=1"],
            "has the figure score: --success takes 'reward'",
        ),
        (["--as-demonstrations", "x", "--query", "none"], "has no trajectory that fits the filters"),
    ],
)
def test_invalid_words_are_refused(flexmarl: Flexmarl, words: list[str], why: str) -> None:
    status, out, err = flexmarl(*words)
    assert status == 2 and not out and why in err
    assert not Path("x").exists()


def test_successes_become_demonstrations(flexmarl: Flexmarl, tmp_path: Path) -> None:
    file = tmp_path / "walks.jsonl"
    status, out, err = flexmarl("--as-demonstrations", str(file), "--success", "accuracy>=0.5")
    assert status == 0 and not err
    assert out == f"{file} has demonstrations of 2 queries: the best of 2 successes among 3 trajectories\n"
    assert read_demonstrations(str(file), tmp_path, ("solver", "judge")) == {
        text: Demonstration({"solver": ("4",), "judge": ("no",)}, f"{file}, line {number}")
        for number, text in enumerate(("1+2", "3+2"), 1)
    }


def test_the_difference_between_trainer_and_engine_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = trajectory(1, 1, 0)
    run = recorded_run(tmp_path / "run", [record(one)], to_yaml(resolve(str(TINY), [*SIMULATED_POLICIES])))
    file = SampleFile(run.samples, 50, NO_LIMIT)
    file.add_compared(
        [compared(one, by=0.25), compared(one._replace(turns=one.turns[1:]), by=-0.5, version=4)]
    )
    file.close()
    assert main(["samples", str(run.path), "--differences"]) == 0
    text = capsys.readouterr().out
    assert "mean log-prob -0.255 · trainer differs by 0.25 a token, 0.25 at most" in text
    assert "trainer (version 4) differs by 0.5 a token" in text
    assert "4[+0.2]" in text and "<110>[-0.5]" in text
    assert main(["samples", str(run.path), "--tokens", "--json"]) == 0
    turns = json.loads(capsys.readouterr().out)["turns"]
    assert [turn["trainer_logprobs"] for turn in turns] == [pytest.approx([-0.25, 0.24]), [-2.0]]
    assert [turn["trainer_version"] for turn in turns] == [1, 4]


def test_a_terminal_gets_colours_and_no_command_of_the_model() -> None:
    one = trajectory(1, 1, 0, text="\x1b[2Jgone")
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system="truecolor", width=80)

    def pieces(turn: RecordedTurn) -> list[str]:
        return ["\x1b[2J"] * len(turn.tokens)

    show(console, one)
    show(console, one, pieces)
    text = output.getvalue()
    assert "\x1b[2J" not in text and "\\x1b[2Jgone" in text and "48;2;255" in text


def test_a_turn_of_an_endpoint_has_no_log_probabilities_to_show() -> None:
    one = trajectory(1, 0, 0)
    turns = [one.turns[0]._replace(text="four", tokens=tuple(b"four"), logprobs=()), one.turns[1]]
    output = io.StringIO()
    show(
        Console(file=output, width=80),
        one._replace(turns=tuple(turns)),
        lambda turn: ["x"] * len(turn.tokens),
    )
    assert "\n  four\n" in output.getvalue() and "x[-1.50]" in output.getvalue()


def test_shades_grow_with_surprise() -> None:
    assert style_of(0.0, "probability") == style_of(-0.01, "probability") == ""
    assert style_of(-0.7, "probability") == "black on rgb(255,142,142)"
    assert style_of(-50.0, "probability") == "black on rgb(255,30,30)"


def test_shades_grow_with_the_difference_of_trainer_and_engine() -> None:
    assert (
        style_of(1e-3, "difference")
        == style_of(-1e-5, "difference")
        == style_of(math.nan, "difference")
        == ""
    )
    assert style_of(0.01, "difference") == style_of(-0.01, "difference") == "black on rgb(255,180,180)"
    assert style_of(7.0, "difference") == "black on rgb(255,30,30)"
