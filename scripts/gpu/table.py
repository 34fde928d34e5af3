"""The table of tests. Each is a file of this folder with a function ``run``, and a row here."""

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Row:
    """``module``: its file here, or one elsewhere by its whole name; the docstring begins with the point that it
    proves. ``limit_s``: then it is killed. ``on_cpu``: with ``--device cpu`` it runs, with small shapes. ``doubts``:
    checks that a reading of the code as it was at commit 923309b expected to fail on a GPU."""

    name: str
    module: str
    limit_s: int
    on_cpu: bool = False
    doubts: tuple[str, ...] = ()

    @property
    def import_name(self) -> str:
        return self.module if "." in self.module else f"{__package__}.{self.module}"

    @property
    def proves(self) -> str:
        """The first line of the file's docstring, which is read without importing it."""
        file = find_spec(self.import_name)
        assert file is not None and file.origin is not None, self.import_name
        docstring = ast.get_docstring(ast.parse(Path(file.origin).read_text())) or ""
        return docstring.partition("\n")[0].replace("``", "")


TESTS = (
    Row("T0", "machine", 40, on_cpu=True),
    Row("T1", "device_paths", 60, on_cpu=True),
    Row("T2", "side_processes", 50, on_cpu=True),
    Row("T3", "publish_latency", 50, on_cpu=True, doubts=("publish beside them", "full cache")),
    Row("T4", "staging_speed", 60, on_cpu=True, doubts=("share of the pinned copy", "products lost")),
    Row("T5", "trainer_speed", 240, on_cpu=True),
    Row("T6", "layer_speed", 100, on_cpu=True),
    Row("T7", "gang_memory", 180, on_cpu=True),
    Row("T8", "lost_member", 70, on_cpu=True),
    Row("T9", "engine_agreement", 110, on_cpu=True),
    Row("T10", "end_to_end", 280, on_cpu=True),
    Row("T11", "actor_start", 70, on_cpu=True),
    Row("T12", "crowded_card", 80, on_cpu=True),
    Row("T13", "long_run", 240, on_cpu=True),
    Row("T14", "mixture", 110, on_cpu=True),
)
"""In the order in which they run. The limits together are below 30 minutes."""
