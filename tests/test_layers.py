"""The rules about imports and names, held against the package; and small bad files, held against the checker."""

import ast
from pathlib import Path

import pytest

from .layers import (
    CORE,
    LAYERS,
    PACKAGE,
    ROOT,
    RULES,
    Rule,
    against_the_order_of_core,
    check,
    import_cycle,
    named_like_a_library,
)

SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def test_the_package_keeps_the_rules() -> None:
    assert len(SOURCES) > 30
    violations = [line for path in SOURCES for line in check(str(path.relative_to(ROOT)), path.read_text())]
    assert not violations, "\n".join(["", *violations])


def _sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in SOURCES}


def test_no_import_cycle() -> None:
    assert import_cycle(_sources()) == []


def test_core_is_built_in_order() -> None:
    assert against_the_order_of_core(_sources()) == []
    parts = {path.relative_to(ROOT).parts[1].removesuffix(".py") for path in (ROOT / "core").rglob("*.py")}
    assert parts - {"__init__"} == set(CORE)


def test_a_long_class_says_why_it_is_one() -> None:
    """There is no limit of lines for a file, which has one subject. A class of more than 300 lines is the exception
    that gives its reason."""
    silent = [
        f"{path}:{node.lineno} {node.name}"
        for path, source in _sources().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= 300
        if "ne class" not in (ast.get_docstring(node) or "")
    ]
    assert silent == []


def test_no_file_is_named_like_a_library_that_it_imports() -> None:
    assert [path for path, source in _sources().items() if named_like_a_library(path, source)] == []


@pytest.mark.parametrize(
    "back",
    [
        "from ..b import y",
        "import flexmarl.core.b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..b import y",  # of another folder
        "def f():\n    from .. import b",
        "from .. import B",
        "import flexmarl.core",
    ],
)
def test_a_cycle_is_found(back: str) -> None:
    sources = {
        "core/__init__.py": "def __getattr__(name):\n    from . import b",
        "core/b.py": "from .wire.c import z",
        "core/wire/c.py": "",
        "core/wire/d.py": "from . import c\nfrom ..b import y",
    }
    assert import_cycle(sources) == []
    cycle = import_cycle(sources | {"core/wire/c.py": back})
    assert {"core/b.py", "core/wire/c.py"} <= set(cycle)


def test_an_import_for_types_may_point_back_inside_a_folder() -> None:
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .{} import y"
    sources = {
        "actors/__init__.py": "",
        "actors/b.py": for_types.format("c"),
        "actors/c.py": "from .b import x",
    }
    assert import_cycle(sources) == []
    assert import_cycle(sources | {"actors/b.py": "def f():\n    from .c import y"})
    across = {
        "core/call_context.py": for_types.format("delivery.mailbox"),
        "core/delivery/mailbox.py": "from ..call_context import x",
    }
    assert import_cycle(across) == []
    assert against_the_order_of_core(across) == []
    assert import_cycle(
        {
            "core/waits.py": across["core/call_context.py"],
            "core/delivery/mailbox.py": "from ..waits import x",
        }
    )


def test_an_import_against_the_order_of_core_is_found() -> None:
    sources = {
        "core/__init__.py": "from .ref import ActorRef",
        "core/ref.py": "from .protocol.codec import Buffer",
        "core/protocol/codec.py": "",
        "core/protocol/session.py": "from . import codec",
    }
    assert against_the_order_of_core(sources) == []
    wrong = {"core/protocol/codec.py": "if TYPE_CHECKING:\n    from ..ref import ActorRef"}
    assert against_the_order_of_core(sources | wrong) == ["core/protocol/codec.py imports core/ref.py"]
    front_door = {"core/ref.py": "from . import Actor"}
    assert against_the_order_of_core(sources | front_door) == ["core/ref.py imports core/__init__.py"]


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("actors/engines/transformers.py", "import transformers", True),
        ("actors/engines/transformers.py", "def f():\n    from transformers import AutoModel", True),
        ("core/wire/zeromq.py", "import zmq", False),
        ("core/delivery/streams.py", "from .streams import x\nfrom flexmarl.core import streams", False),
        ("core/telemetry/logging.py", "import logging.handlers", True),
    ],
)
def test_a_file_named_like_its_library_is_found(path: str, source: str, found: bool) -> None:
    assert named_like_a_library(path, source) == found


def test_the_package_tree_links_to_the_folders() -> None:
    tree = ROOT / "scripts" / "src" / PACKAGE
    assert {path.name for path in tree.iterdir() if path.is_dir()} - {"__pycache__"} == set(LAYERS)
    for layer in LAYERS:
        assert (tree / layer).readlink() == Path("../../..") / layer  # relative: a checkout may be moved
        assert (tree / layer).resolve() == ROOT / layer
        assert (ROOT / layer).is_dir()


# Files that break each rule, one for every way of breaking it; #! marks the lines to be found.
BAD = [
    ("core/x.py", "from ..transport.handle import StateHandle  #!"),
    ("core/x.py", "def f():\n    from ..launch import env  #!"),
    ("core/x.py", "import flexmarl.actors.messages  #!"),
    ("transport/tensors/x.py", "from ...actors import messages  #!"),
    ("transport/x.py", "from flexmarl.launch.hosts.env import actor_environment  #!"),
    ("transport/x.py", "from .. import actors  #!"),
    ("actors/rollout/x.py", "from ...launch.config import RunConfig  #!"),
    ("actors/orchestrator/x.py", "from ..store.actor import Store  #!"),
    ("actors/inference/engines/x.py", "from ...trainer import loss  #!"),
    ("actors/rollout/x.py", "from ..inference.instance import Instance  #!"),
    ("actors/rewards/x.py", "from ..rollout.trajectory import Trajectory  #!"),
    ("actors/credit/x.py", "from ..rollout.trajectory import Trajectory  #!"),
    ("actors/trainer/backends/x.py", "from ... import rollout  #!"),
    ("actors/store/x.py", "from ..secrets import key  #!"),
    ("actors/messages.py", "from .trainer.config import AlgorithmConfig  #!"),
    ("launch/run/x.py", "from ..cli.train import train  #!"),
    ("launch/x.py", "import core.errors  #!"),
    ("launch/x.py", "from transport import state  #!"),
    ("core/x.py", "import numpy as np  #!\nx = 1"),
    ("core/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor  #!"),
    ("transport/x.py", "import torch  #!"),
    (
        "transport/message_arrays.py",
        "from .handle import StateHandle\nfrom torch import Tensor  #!",
    ),
    ("transport/x.py", "if TYPE_CHECKING:\n    pass\nelse:\n    from torch import Tensor  #!"),
    ("launch/x.py", "import os\nhome = os.environ['HOME']  #!"),
    ("actors/x.py", "import os as system\nsystem.getenv('HOME')  #!"),
    ("core/x.py", "from os import environ  #!\nf = environ  #!"),
    (
        "core/x.py",
        "import os.path\nfolder = os.path.join(\n    os.environ['HOME'],  #!\n    os.getenv('X'))  #!",
    ),
    ("core/x.py", "import pickle  #!"),
    ("launch/x.py", "from marshal import loads  #!"),
    ("actors/trainer/x.py", "import torch\nstate = torch.load('x')  #!"),
    ("actors/trainer/x.py", "import torch as t\nf = t.load  #!"),
    ("actors/trainer/x.py", "from torch import load  #!"),
    ("actors/x.py", "exec('1')  #!\nmap(eval, [])  #!"),
    ("actors/x.py", "import builtins\nbuiltins.eval('1')  #!"),
    ("actors/x.py", "__import__('pickle')  #!"),
    *(
        ("core/x.py", f"import {module}  #!")
        for module in (
            "_pickle",
            "cPickle",
            "cloudpickle",
            "dill",
            "jsonpickle",
            "joblib",
            "shelve",
            "runpy",
            "code",
        )
    ),
    ("core/x.py", "socket.recv_pyobj()  #!\nself.sockets[0].send_pyobj(x)  #!"),
    ("core/x.py", "import multiprocessing as mp\na, b = mp.Pipe()  #!"),
    ("launch/x.py", "from multiprocessing.connection import Listener  #!"),
    ("transport/tensors/x.py", "import torch.distributed as dist\ndist.broadcast_object_list(x)  #!"),
    ("transport/tensors/x.py", "from torch import multiprocessing  #!"),
    ("actors/x.py", "f = compile(text, '', 'exec')  #!"),
    ("core/x.py", "from pydantic import ImportString  #!"),
    ("actors/x.py", "Model.from_pretrained(path, trust_remote_code=True)  #!"),
    ("launch/x.py", "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)  #!"),
    ("launch/x.py", "import yaml as y\ny.unsafe_load(text)  #!\ny.full_load(text)  #!"),
    ("launch/x.py", "from yaml import Loader  #!"),
    ("actors/x.py", "import numpy as np\nnp.load(file, allow_pickle=True)  #!"),
    ("actors/x.py", "np.load(file, allow_pickle=flag)  #!"),
    ("core/wire_x.py", "import msgpack\nmsgpack.unpackb(x, ext_hook=build)  #!"),
    ("transport/x.py", "Unpacker(\n    object_hook=build,  #!\n    list_hook=tuple)  #!"),
    ("core/protocol/codec.py", "msgpack.unpackb(x, ext_hook=f, object_pairs_hook=build)  #!"),
    ("core/x.py", "import importlib\nimportlib.import_module(name)  #!"),
    ("actors/rollout/x.py", "from importlib import import_module  #!"),
    ("core/x.py", "from importlib.util import spec_from_file_location  #!"),
    (
        "launch/host.py",
        "from importlib import util as u\nm = u.module_from_spec(x)  #!\nx.loader.exec_module(m)  #!",
    ),
    ("launch/x.py", "from flexmarl.testing import MemoryNetwork  #!"),
    ("core/x.py", "from .. import testing  #!"),
    ("core/host_x.py", "import pkgutil\npkgutil.resolve_name(x)  #!"),
    ("actors/x.py", "import asyncio\nasync def f():\n    await asyncio.to_thread(f)  #!"),
    ("actors/rollout/x.py", "from time import monotonic  #!\nimport time\nnow = time.perf_counter()  #!"),
    ("actors/store/x.py", "import asyncio\nasyncio.get_running_loop().run_in_executor(pool, f)  #!"),
]


GOOD = [
    ("launch/x.py", "from ..actors.rollout import actor\nfrom ..core.errors import FlexmarlError"),
    (
        "actors/trainer/backends/x.py",
        "from ..loss import f\nfrom ...messages import Sample\nfrom .base import g",
    ),
    (
        "actors/rollout/x.py",
        "from ...transport.state import StateTransport\nfrom ..recipe.recipe import Recipe",
    ),
    ("transport/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
    ("transport/tensors/x.py", "import torch"),
    ("launch/hosts/env.py", "import os\nhome = os.environ['HOME']"),
    ("actors/x.py", "core = model.core\ncore.load()\nmodel.eval()\nmodel.exec('x')"),
    ("actors/x.py", "def run(core, exec_: Callable[[], int]):\n    return core.errors"),
    ("core/x.py", "import torchlight\nimport numpydoc"),
    ("core/x.py", "import re\npattern = re.compile('x')\nself.compile(x)\nstatus.code"),
    ("transport/tensors/x.py", "import torch.distributed as dist\ndist.broadcast(x)"),
    ("launch/x.py", "import yaml\nyaml.safe_load(text)\nyaml.safe_dump(x)\nyaml.YAMLError"),
    ("actors/x.py", "np.load(file, allow_pickle=False)\njson.loads(text, object_hook=None)"),
    ("core/protocol/codec.py", "msgpack.unpackb(x, ext_hook=extension, list_hook=count, object_hook=count)"),
    ("core/supervision/worker_init.py", "import importlib\nimportlib.import_module(name)"),
    ("actors/recipe/recipe.py", "import importlib.util\nimportlib.util.module_from_spec(spec)"),
    (
        "launch/x.py",
        "from importlib.metadata import version\nimport importlib.util\nimportlib.util.find_spec('ray')",
    ),
    ("launch/x.py", "import multiprocessing.shared_memory"),
    ("actors/x.py", "import asyncio\nnow = asyncio.get_running_loop().time()\nevent = threading.Event()"),
    ("actors/inference/engines/x.py", "import time\nnow = time.perf_counter()"),
]


@pytest.mark.parametrize(("path", "source"), BAD)
def test_the_checker_finds_a_violation(path: str, source: str) -> None:
    marked = {number for number, line in enumerate(source.splitlines(), 1) if line.endswith("#!")}
    found = check(path, source)
    assert {int(line.split(":")[1]) for line in found} == marked, found


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_the_checker_finds_nothing_else(path: str, source: str) -> None:
    assert check(path, source) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_been_seen_to_fail(rule: Rule) -> None:
    assert any(rule.name in line for path, source in BAD for line in check(path, source))


def test_a_violation_is_named_by_file_line_and_rule() -> None:
    assert check("core/x.py", "\nimport torch") == [
        "core/x.py:2: uses torch (core knows buffers, no arrays and no engines)"
    ]
