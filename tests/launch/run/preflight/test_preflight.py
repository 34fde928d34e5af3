"""The checks before a start, as ``flexmarl train`` and ``--dry-run`` run them: in a process of their own."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.cli.main import main
from flexmarl.launch.config.config_reading import resolve_written
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.config.written_config import UNCHANGED
from flexmarl.launch.hosts import host_description
from flexmarl.launch.run import resuming
from flexmarl.launch.run.preflight import adapter_checks, data_comparison, preflight, process
from flexmarl.launch.run.preflight.model_checks import no_cuda_reason
from flexmarl.launch.run.preflight.preflight import check_before_start
from flexmarl.launch.run.preflight.recipe_checks import recipe_findings
from flexmarl.launch.run.prepared_run import resume_from_newest_checkpoint
from flexmarl.launch.run.resuming import StartState
from flexmarl.launch.run.run import Run
from flexmarl.launch.run_folder.run_directory import RunDirectory

from ....patience import PATIENCE_S
from ...conftest import NO_FINDINGS, SOURCES, TINY
from ...fake_nvml import FakeGpu, devices_of

Recipe = Callable[..., Path]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def refuse(*_: object) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(Run, "_until_the_end", refuse)
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For checks of models that import torch: the process of the checks takes seconds to start."""
    assert "torch" in sys.modules, "it would be blocked for all later tests"
    monkeypatch.setattr(
        preflight, "_findings", lambda config, _: process._findings(config, recipe_findings(config))
    )


def refusal(recipe: Path, *overrides: str) -> list[str]:
    config, keys = resolve_written(str(recipe), overrides)
    with pytest.raises(ConfigError) as refused:
        check_before_start(config, keys)
    head, *problems = str(refused.value).splitlines()
    assert head == f"{recipe.resolve()}, checked before the start:"
    return [problem.removeprefix("  ") for problem in problems]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A copy of the tiny recipe, without files of bytecode."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(TINY, tmp_path / "project" / "my-recipe", ignore=ignored)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def test_a_dry_run_tries_all_and_writes_no_file(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe / "words.py").write_text("RIGHT = 1\n")
    (recipe / "workflow.py").write_text(
        f"import words\nprint('hello')\n{(recipe / 'workflow.py').read_text()}"
    )
    monkeypatch.chdir(recipe.parent)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    before = tree(recipe.parent)
    assert main(["train", "my-recipe", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("recipe: ") and "hello" not in shown.out
    config = yaml.safe_load(shown.out)
    assert config["hosts"] == {"share_gpus": False, "spread": False}
    rows = [line.split()[1] for line in shown.out.splitlines() if line.startswith("# ")]
    assert rows[:8] == [
        "actor", "store", "router", "orchestrator", "trainer", "solver-0", "checker-0", "rollout-0"
    ]  # fmt: skip
    assert shown.out.endswith("# checked; nothing was started or written\n")
    assert tree(recipe.parent) == before


def test_notices_of_slow_checks_are_no_part_of_the_config_that_a_dry_run_prints(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow_findings(config: RunConfig, notify: Callable[[str], object]) -> dict[str, object]:
        notify("checking it for 12 s")
        return NO_FINDINGS

    monkeypatch.setattr(preflight, "_findings", slow_findings)
    assert main(["train", str(recipe), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["recipe"] and "checking" not in shown.out
    assert "checking it for 12 s\n" in shown.err


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("words", [["--dry-run"], []])
def test_a_mistake_is_refused_before_the_run_has_a_folder(
    recipe: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe / "workflow.py").write_text("def workflow(query, agents): ...\n")
    assert main(["train", str(recipe), "--runs", "runs", *words]) == 2
    assert "workflow.py defines no function 'train_query'" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_experts_that_can_not_be_replayed_are_refused_by_a_process_that_imports_torch_for_them(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "agents.checker.model.config={model_type: phimoe, num_local_experts: 4}"
    assert main(["train", str(recipe), "--dry-run", model, "agents.checker.model.router_replay=true"]) == 2
    said = capsys.readouterr().err
    assert "PhimoeForCausalLM: router_replay can't follow the choice of its router" in said
    assert "leave router_replay out" in said


@pytest.mark.usefixtures("in_this_process")
def test_recipe_and_models_are_reported_together(recipe: Path) -> None:
    found = refusal(recipe, "data.shap=pair", "agents.checker.model.config.model_type=qwen99")
    assert found[0].startswith(
        "agents.checker.model.config.model_type='qwen99': the model's config can't be loaded"
    )
    assert found[0].endswith("(agent checker)") and len(found) == 1
    with (recipe / "workflow.py").open("a") as code:
        code.write("workflow = _share\n")
    found = refusal(recipe, "agents.checker.model.config.model_type=qwen99")
    assert found[0].startswith("workflow.py: workflow is not async") and len(found) == 2, found


@pytest.mark.usefixtures("in_this_process")
def test_a_mistake_in_agent_defaults_is_named_there_once(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (found,) = refusal(recipe, f"agent_defaults.model.tokenizer={tmp_path / 'words'}")
    start = f"agent_defaults.model.tokenizer='{tmp_path / 'words'}': the tokenizer can't be loaded: "
    assert found.startswith(start) and found.endswith("(agents solver, checker)")


@pytest.mark.usefixtures("in_this_process")
def test_a_folder_without_weights(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (found,) = refusal(
        recipe, f"agents.solver.model={{path: {tmp_path / 'empty'}, config: null, tokenizer: null}}"
    )
    assert "the folder holds no weights (*.safetensors, *.bin) (agent solver)" in found


@pytest.mark.usefixtures("in_this_process")
def test_an_adapter_for_layers_that_the_model_does_not_have(recipe: Path) -> None:
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert refusal(recipe, "agents.checker.lora={targets: [q_proj, qkv]}") == [
        f"agents.checker.lora.targets: the model has no linear layer 'qkv'; it has: {known}"
    ]
    config, keys = resolve_written(str(recipe), ["agent_defaults.lora={rank: 2}"])
    check_before_start(config, keys)


def test_an_adapter_needs_peft(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_checks, "find_spec", lambda _name: None)
    config, _ = resolve_written(str(recipe), ["agents.solver.lora={}"])
    assert list(adapter_checks.missing_library(config)) == [
        "policies.solver.lora: peft is not installed: pip install 'flexmarl[lora]'"
    ]
    without, _ = resolve_written(str(recipe), [])
    assert list(adapter_checks.missing_library(without)) == []


@pytest.mark.usefixtures("in_this_process")
def test_cuda_is_refused_without_a_device(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    devices = ("agents.solver.model.device=cuda", "agents.checker.model.device='cuda:1'")
    reason = no_cuda_reason(torch.__version__, torch.version.cuda, "")
    none = f"PyTorch finds no CUDA device here{reason}; device=cpu needs none"
    assert refusal(recipe, *devices) == [
        f"agents.solver.model.device='cuda': {none} (agent solver)",
        f"agents.checker.model.device='cuda:1': {none} (agent checker)",
    ]


def test_a_run_that_does_not_fit_this_host_is_refused_with_the_keys_as_they_are_written(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch can't be given a device here, so its process is left out."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "_findings", lambda *_: {"recipe": [], "models": [], "cached": False})
    gpus = devices_of(FakeGpu("GPU-1"), FakeGpu("GPU-2", processes=((2**22 + 1, 5 << 30),)))
    monkeypatch.setattr(host_description, "read_devices", lambda: gpus)
    (found,) = refusal(recipe, "agent_defaults.model.device=cuda")
    assert found.startswith(
        "the instances need 2 GPUs (agents.solver.instances=1, agents.checker.instances=1), and there are 1: 1 on "
    )
    assert found.endswith(
        f"is used by process {2**22 + 1} of an unknown user, 5.0 GiB, and 80.0 GiB of it are free: "
        "hosts.share_gpus=true takes it all the same"
    )
    (found,) = refusal(recipe, "agent_defaults.model.device='cuda:2'")
    assert found.startswith(
        "agent_defaults.model.device='cuda:2': GPU 2 is needed, counted from 0, and 2 are shown on "
    )
    config, keys = resolve_written(str(recipe), ["agent_defaults.model.device=cuda", "hosts.share_gpus=true"])
    check_before_start(config, keys)


HUB = (
    "agent_defaults.model={path: Qwen/Qwen2.5-0.5B-Instruct, config: null, tokenizer: null}",
    "checks.trajectory=false",  # none is played without a model, and a process would be started for its queries
)


def test_a_hub_that_can_not_be_reached_is_reported_with_the_model(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens there. The hub is asked once: its client alone tries each file for 23 s."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    (found,) = refusal(recipe, *HUB)
    assert found.startswith("agent_defaults.model.path='Qwen/Qwen2.5-0.5B-Instruct': there is no such folder")
    assert "the hub http://127.0.0.1:9 can't be reached (" in found
    assert found.endswith(" (agents solver, checker)")


def test_offline_a_model_that_is_not_cached_is_named(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (found,) = refusal(recipe, *HUB)
    assert "it is not in the hub's cache; HF_HUB_OFFLINE forbids a download" in found


@pytest.mark.parametrize("end", ["import sys; sys.exit(3)", "import os; os._exit(3)"])
def test_a_recipe_that_ends_its_process_is_reported(recipe: Path, end: str) -> None:
    (recipe / "workflow.py").write_text(f"print('last words', flush=True)\n{end}\n")
    problems = refusal(recipe, "checks.trajectory=false")  # else a second process imports it
    assert problems == ["the process that imports workflow.py ended with status 3", "last words"]


HANGING = """from pathlib import Path
import os, signal, time
(Path(__file__).parent / "pid").write_text(str(os.getpid()))
{line}
"""


def hanging(recipe: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> RunConfig:
    """A recipe whose import stands at ``line``, and checks with short times."""
    (recipe / "workflow.py").write_text(HANGING.format(line=line))
    monkeypatch.setattr(preflight, "_SILENCE_S", 0.2)
    config, _ = resolve_written(str(recipe), ["checks.trajectory=false"])  # else a second process imports it
    return config


def is_gone(recipe: Path) -> bool:
    return not psutil.pid_exists(int((recipe / "pid").read_text()))


class Noticed(Exception):
    pass


def test_a_recipe_that_computes_for_ever_is_notified_with_its_line_and_ends_with_the_time(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process writes its place every 10 s."""
    config = hanging(recipe, monkeypatch, "while True: time.sleep(0.01)")
    notices: list[str] = []

    def notify(text: str) -> None:
        notices.append(text)
        if "workflow.py:4" in text:
            monkeypatch.setattr(preflight, "_TIMEOUT_S", 0.0)

    with pytest.raises(ConfigError) as refused:
        check_before_start(config, UNCHANGED, notify)
    line = "workflow.py:4, in <module>: while True: time.sleep(0.01)"
    assert (
        notices[-1].startswith(f"checking {config.recipe} for ") and f"; it stands at {line}" in notices[-1]
    )
    assert "workflow.py was not imported, or its first queries not made, within 0 s; it " in str(
        refused.value
    )
    assert line in str(refused.value) and is_gone(recipe)


def test_a_process_of_the_checks_that_is_stopped_is_named_and_ends_with_the_time(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = hanging(recipe, monkeypatch, "os.kill(os.getpid(), signal.SIGSTOP)")
    notices: list[str] = []

    def notify(text: str) -> None:
        notices.append(text)
        if "stopped by a signal" in text:
            monkeypatch.setattr(preflight, "_TIMEOUT_S", 0.0)

    with pytest.raises(ConfigError) as refused:
        check_before_start(config, UNCHANGED, notify)
    pid = (recipe / "pid").read_text()
    silent = f"; the process of the checks does not answer (process {pid}, stopped by a signal)"
    assert notices[-1].endswith(silent)
    assert str(refused.value) == (
        f"{config.recipe}: workflow.py was not imported, or its first queries not made, within 0 s{silent}"
    )
    assert is_gone(recipe)


def test_a_notice_that_raises_ends_the_checks_and_their_process(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ctrl-C does."""
    config = hanging(recipe, monkeypatch, "os.kill(os.getpid(), signal.SIGSTOP)")

    def notify(text: str) -> None:
        if (recipe / "pid").exists():
            raise Noticed

    with pytest.raises(Noticed):
        check_before_start(config, UNCHANGED, notify)
    assert is_gone(recipe)


def test_a_process_that_the_recipe_has_started_does_not_keep_the_checks(recipe: Path) -> None:
    """It has their pipe, for as long as it lives."""
    workflow = (recipe / "workflow.py").read_text()
    starts = "import subprocess\nfrom pathlib import Path\nserver = subprocess.Popen(['sleep', '3600'])\n"
    writes = "(Path(__file__).parent / 'pid').write_text(str(server.pid))\n"
    (recipe / "workflow.py").write_text(f"{starts}{writes}{workflow}")
    try:
        config, keys = resolve_written(str(recipe), ["checks.trajectory=false"])
        check_before_start(config, keys)
    finally:
        psutil.Process(int((recipe / "pid").read_text())).kill()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("word", "warned"), [("tools", True), ("toolshed", False)])
def test_calls_that_are_not_recognised_are_said_if_the_recipe_has_tools(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, word: str, warned: bool
) -> None:
    from flexmarl.launch.run.preflight import chat_checks

    monkeypatch.setattr(chat_checks, "foreign_form", lambda tokenizer: "the reason")
    workflow = recipe / "workflow.py"
    workflow.write_text(f"{workflow.read_text()}\n# {word}\n")
    config, keys = resolve_written(str(recipe), [])
    said: list[str] = []
    check_before_start(config, keys, said.append)
    text = "warning: policy solver: calls of tools in its answers are not recognised: the reason"
    assert said == ([text] if warned else [])


BODY = """async def workflow(query, agents):
    turn = await agents["solver"].generate(query.text)
    {}
    return Rewards(solver=1.0)
"""
MINIMAL = """import os, time
from pathlib import Path
from flexmarl.actors import Query, Rewards

{workflow}
def train_query(position, seed): return Query(f"q{{position}}", {text})
def eval_queries(seed): return []
"""
SIMULATED = {"engine": {"name": "simulated"}, "trainer": {"name": "simulated"}}


def minimal(tmp_path: Path, line: str, text: str = "'text'", timeout_s: float = 60.0) -> Path:
    """A recipe without a model, whose workflow has ``line`` behind its only turn."""
    folder = tmp_path / "minimal"
    folder.mkdir()
    (folder / "workflow.py").write_text(MINIMAL.format(workflow=BODY.format(line), text=text))
    config = {
        "agents": {"solver": SIMULATED},
        "training": {"steps": 1, "queries_per_step": 2, "trajectories_per_query": 2, "micro_batch": 1},
        "checks": {"trajectory_timeout_s": timeout_s},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_a_mistake_of_the_first_trajectory_is_refused_before_the_run_has_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = minimal(tmp_path, "return Rewards()")
    assert main(["train", str(folder), "--runs", "runs"]) == 2
    errors = capsys.readouterr().err
    assert "workflow.py:5, in workflow: the workflow used agent 'solver' and returned no reward" in errors
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("line", "timeout_s", "words"),
    [
        ("os._exit(3)", 60.0, "no trajectory was played before the start: its process ended with status 3"),
        ("time.sleep(3600)", 0.5, "stood at workflow.py:7, in workflow: time.sleep(3600)"),
        ("Path('notes.txt').touch()", 60.0, None),
    ],
)
def test_a_workflow_that_ends_its_process_blocks_it_or_writes_files_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, timeout_s: float, words: str | None
) -> None:
    monkeypatch.setattr(preflight, "_LATE_S", PATIENCE_S)
    folder = minimal(tmp_path, line, timeout_s=timeout_s)
    before = tree(tmp_path)
    config, keys = resolve_written(str(folder), ())
    notices: list[str] = []

    def notify(text: str) -> None:
        notices.append(text)
        if "it stands at workflow.py:7, in workflow: time.sleep(3600)" in text:
            monkeypatch.setattr(preflight, "_LATE_S", 0.0)

    assert check_before_start(config, keys, notify) == {}
    warnings = [notice for notice in notices if notice.startswith("warning: ")]
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]
    assert tree(tmp_path) == before


def test_a_run_that_has_played_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configs: list[RunConfig] = []

    def note(config: RunConfig, notify: Callable[[str], object]) -> dict[str, object]:
        configs.append(config)
        return NO_FINDINGS

    monkeypatch.setattr(preflight, "_findings", note)
    config, _ = resolve_written(str(minimal(tmp_path, "pass")), ())
    directory = RunDirectory.create(tmp_path / "run", "")
    for checkpoint in (None, (tmp_path, None)):
        start = StartState(config, checkpoint, {}, [])  # type: ignore[arg-type]  # its state is not looked at
        monkeypatch.setattr(resuming, "plan_resume", lambda *_, start=start: start)
        monkeypatch.setattr(StartState, "step", 0)
        resume_from_newest_checkpoint(directory, (), ())
    assert [config.checks.trajectory for config in configs] == [True, False]


def test_training_data_that_depends_on_the_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(data_comparison, "_PATIENCE_S", PATIENCE_S)
    (problem,) = refusal(minimal(tmp_path, "pass", text="str(hash(f'{seed} {position}'))"))
    assert problem.startswith("workflow.py: train_query(0, seed) gives another query in another process")


@pytest.mark.usefixtures("in_this_process")
def test_a_folder_without_a_tokenizer(recipe: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 14}')
    (model / "model.safetensors").touch()
    (problem,) = refusal(recipe, f"agent_defaults.model={{path: {model}, config: null, tokenizer: null}}")
    assert f"model.path='{model}': it holds no tokenizer" in problem


def test_a_prompt_is_measured_and_rendered_by_the_models_own_tokenizer(recipe: Path) -> None:
    (problem,) = refusal(recipe, "agent_defaults.sampling.max_new_tokens=64")
    assert "4 prompt tokens + 64 new ones exceed the engine's context of 64 tokens" in problem
    workflow = recipe / "workflow.py"
    chat = """[{"role": "user", "content": query.text}]"""
    workflow.write_text(workflow.read_text().replace('generate(f"{query.text}=")', f"generate({chat})"))
    (problem,) = refusal(recipe)
    assert "workflow.py:" in problem and "has no chat template: give the prompt as text" in problem
