"""The change that the metrics page shows adds a figure everywhere, by two files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ..checkouts import changed_checkout, changed_files
from ..patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGE = Path("launch", "docs", "metrics.md")


MEASURES = """
import json
from pathlib import Path

from flexmarl.actors.messages import PolicyStepped, Published
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.orchestrator.recorder import StepRecord
from flexmarl.launch.run_folder.json_lines import metrics_to_json
from flexmarl.launch.monitoring.page.frozen_page import write_report
from flexmarl.launch.monitoring.sinks.run_sinks import figures_of_step
from flexmarl.transport.handle import StateHandle
from tests.actors.trainer.backends.torch_policy.policies import make_policy, make_samples

name = PolicyName("solver")
policy = make_policy()
for seed in (1, 2):
    policy.accumulate(make_samples(seed))
record = StepRecord(Step(1), {name: Version(0)}, [AgentName("solver")], started=0.0)
published = Published(name, Version(1), StateHandle("solver", 1, 0, 0, (), ()))
record.optimizer_stepped(name, PolicyStepped(published, policy.optimizer_step(), 0.0), now=1.0)
metrics = record.metrics({name: Version(1)}, {}, 0.0, 0.0, 1.0)
line = metrics_to_json(metrics)
Path("metrics.jsonl").write_text(json.dumps(line) + "\\n")
write_report(Path.cwd())
assert figures_of_step(metrics, 0.0).figures["unlikely_share/solver"] == line["unlikely_share/solver"]
print(line["unlikely_share/solver"])
"""


def test_a_row_and_a_line_add_a_figure_with_its_chart_and_its_explanation(tmp_path: Path) -> None:
    assert len(changed_files(ROOT / PAGE)) == 2, "the row and the line that measures it"
    checkout = changed_checkout(ROOT / PAGE, tmp_path / "checkout")
    shutil.copy(ROOT / "scripts" / "metrics_page.py", checkout / "scripts")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{checkout / 'scripts' / 'src'}:{ROOT}"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert 0.0 < float(run("-c", MEASURES)) <= 1.0, "divided by the tokens of both micro-batches"
    assert '"title":"Unlikely tokens"' in (tmp_path / "report.html").read_text()
    run(str(checkout / "scripts" / "metrics_page.py"))
    assert "| `unlikely_share/<policy>` | share | trained tokens with" in (checkout / PAGE).read_text()
