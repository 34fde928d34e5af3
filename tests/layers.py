"""The rules about imports and names that a file may use, read from its source without importing it.

The rules are data, at the top; ``check`` holds a file against them.
"""

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePath
from typing import TypeGuard

ROOT = Path(__file__).parents[1]
PACKAGE = "flexmarl"
LAYERS = ("core", "transport", "actors", "launch")  # an arrow may only point to the left
# The files and packages of core, each of which imports only what stands before it.
CORE = (
    "base", "errors", "call_context", "telemetry", "protocol", "spans", "waits", "pacing", "signature", "durable",
    "wire",
    "delivery", "ref", "actor", "supervision", "system", "worker", "testing",
)  # fmt: skip
# Imports for types only that point back over a folder's edge, as (file, imported file).
TYPES_ACROSS = frozenset({
    ("core/actor.py", "core/supervision/local_actors.py"),
    ("core/call_context.py", "core/delivery/mailbox.py"),
    ("core/supervision/process_node.py", "core/system.py"),
    ("core/supervision/supervisor.py", "core/system.py"),
})  # fmt: skip
ROLES = ("orchestrator", "inference", "rewards", "rollout", "trainer", "store")
SHARED_BY_ROLES = (
    "chat", "columns", "compared_logprobs", "config_base", "credit", "deadline", "demonstrations", "environments",
    "errors", "expert_routes", "figures", "filters", "gateway", "json_files", "messages", "model_shape",
    "model_sources", "names", "pretrained", "recipe", "record_queue", "recorded_trajectory", "rolling_mean", "routers",
    "run_events", "sample_id", "segments", "spans", "step_metrics", "trees", "truncated_scores", "workflow",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """Files under ``where`` (but not under ``except_in``) use no name that is, or is inside, one of ``banned``.

    Names are dotted and absolute, also if a file uses an alias: ``flexmarl.core.errors``, ``os.environ``, ``torch``.
    ``.name`` is an attribute of anything, ``name=`` an argument of any call that is not literally None or False.
    """

    name: str
    where: str  # a pattern that a file's path, relative to the checkout, begins with
    banned: tuple[str, ...]
    allowed: tuple[str, ...] = ()  # exceptions from banned
    except_in: str | None = None  # a pattern like where
    for_types_too: bool = True  # also inside `if TYPE_CHECKING:`


RULES = (
    *(
        Rule(
            f"{layer} imports nothing of a layer above it (launch -> actors -> transport -> core)",
            where=f"{layer}/",
            banned=tuple(f"{PACKAGE}.{above}" for above in LAYERS[depth + 1 :]),
        )
        for depth, layer in enumerate(LAYERS[:-1])
    ),
    *(
        Rule(
            f"{role} imports no other role; roles share messages.py and workflow.py only",
            where=f"actors/{role}/",
            banned=(f"{PACKAGE}.actors",),
            allowed=tuple(f"{PACKAGE}.actors.{name}" for name in (role, *SHARED_BY_ROLES)),
        )
        for role in ROLES
    ),
    Rule(
        "what the roles share knows no role",
        where=r"actors/((chat|columns|credit|environments|gateway|messages|recipe|segments)/)?\w+\.py",
        banned=tuple(f"{PACKAGE}.actors.{role}" for role in ROLES),
    ),
    Rule(
        "commands are the outermost room of launch: only torchrun, which is a command too, imports one",
        where=r"launch/(?!cli/|torchrun/)",
        banned=(f"{PACKAGE}.launch.cli",),
    ),
    Rule(
        "the package is flexmarl: a service that embeds it may have a core of its own",
        where="",
        banned=LAYERS,
    ),
    Rule(
        "core knows buffers, no arrays and no engines",
        where="core/",
        banned=("numpy", "safetensors", "torch", "transformers", "vllm"),
    ),
    Rule(
        "in transport only tensors/ and device_memory/ import torch",
        where="transport/",
        except_in=r"transport/(tensors|device_memory)/",
        banned=("torch",),
        for_types_too=False,
    ),
    Rule(
        "only launch/hosts/env.py reads the environment, and processes pass it on",
        where="",
        except_in=r"launch/hosts/env\.py|core/worker/fork_server\.py|core/supervision/process_node\.py"
        r"|actors/gateway/program\.py|launch/recipes/coding_harness/harness\.py",
        banned=("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"),
    ),
    Rule(
        "nothing that arrives, from a peer or from a file, can name code to run",
        where="",
        banned=(
            "_pickle",
            "cPickle",
            "cloudpickle",
            "dill",
            "joblib",
            "jsonpickle",
            "marshal",
            "pickle",
            "shelve",
            "torch.load",
            "trust_remote_code=",
            # sockets and pipes whose messages are pickles
            ".recv_pyobj",
            ".send_pyobj",
            "multiprocessing.Manager",
            "multiprocessing.Pipe",
            "multiprocessing.Pool",
            "multiprocessing.Process",
            "multiprocessing.Queue",
            "multiprocessing.connection",
            "multiprocessing.managers",
            "multiprocessing.pool",
            "multiprocessing.queues",
            "concurrent.futures.ProcessPoolExecutor",
            "concurrent.futures.process",
            "torch.distributed.all_gather_object",
            "torch.distributed.broadcast_object_list",
            "torch.distributed.gather_object",
            "torch.distributed.recv_object_list",
            "torch.distributed.rpc",
            "torch.distributed.scatter_object_list",
            "torch.distributed.send_object_list",
            "torch.multiprocessing",
            # text as code
            "__import__",
            "code",
            "codeop",
            "compile",
            "eval",
            "exec",
            "pkgutil.resolve_name",
            "pydantic.ImportString",
            "pydantic.types.ImportString",
            "pydoc.locate",
            "runpy",
        ),
    ),
    Rule(
        "YAML is read by yaml.safe_load: the other loaders build objects",
        where="",
        banned=(
            *(f"yaml.{name}" for name in ("load", "load_all", "full_load", "full_load_all")),
            *(f"yaml.{name}" for name in ("unsafe_load", "unsafe_load_all", "Loader", "FullLoader")),
            *(
                f"yaml.{name}"
                for name in ("UnsafeLoader", "CLoader", "CFullLoader", "CUnsafeLoader", "loader")
            ),
            *(f"yaml.{name}" for name in ("constructor", "add_constructor", "add_multi_constructor")),
        ),
    ),
    Rule(
        "NumPy reads no pickles from its files",
        where="",
        banned=("allow_pickle=", "numpy.lib.format.read_array"),
    ),
    Rule(
        "no decoder builds objects; MessagePack's extension types are the codec's",
        where="",
        except_in=r"core/protocol/codec\.py",
        banned=("ext_hook=",),
    ),
    Rule(
        "a decoder gives plain data: what it becomes is decided by the receiver's annotations",
        where="",
        banned=("object_pairs_hook=",),
    ),
    Rule(
        "only the codec looks at containers while they are decoded, to count them",
        where="",
        except_in=r"core/protocol/codec\.py",
        banned=("list_hook=", "object_hook="),
    ),
    Rule(
        "the roles read the time from their system, and have it call functions that block: both may be virtual",
        where="actors",
        except_in=r"actors/inference/engines/.*|actors/trainer/backends/torch_policy/.*|actors/store/query\.py"
        r"|actors/rollout/block_watch\.py"
        # a program at a server
        r"|actors/environments/sandboxes/rex_runner\.py"
        # names of segments: they can't be guessed, also in virtual time
        r"|actors/segments/segments\.py"
        # programs and sockets are in real time, and keys can't be guessed
        r"|actors/gateway/.*",
        banned=(
            ".run_in_executor",
            "asyncio.to_thread",
            "concurrent.futures.ThreadPoolExecutor",
            "threading.Thread",
            "time.monotonic",
            "time.perf_counter",
            "time.process_time",
            "time.sleep",
            "time.time",
            # ids: ``system.new_id``
            "os.urandom",
            "secrets",
            "uuid",
        ),
    ),
    Rule(
        "flexmarl.testing is for tests: it stands above all layers",
        where="",
        banned=(f"{PACKAGE}.testing",),
    ),
    Rule(
        "imports by name are for actors, engines, losses, a front door's names, a recipe, commands, in_process",
        where="",
        except_in=r"core/supervision/worker_init\.py|core/worker/fork_server\.py|core/base/front_door\.py|actors/(recipe/(recipe|named_function)|environments/process_main|trainer/objective/token_losses)\.py"
        r"|actors/inference/engines/factories\.py|launch/cli/registry\.py",
        banned=(
            ".exec_module",
            ".load_module",
            "importlib.__import__",
            "importlib.import_module",
            "importlib.machinery",
            "importlib.reload",
            "importlib.util.LazyLoader",
            "importlib.util.module_from_spec",
            "importlib.util.spec_from_file_location",
            "importlib.util.spec_from_loader",
            "zipimport",
        ),
    ),
)


@dataclass(frozen=True)
class Use:
    """A name that a file imports or refers to, an attribute (``.name``) or an argument (``name=``)."""

    name: str
    line: int
    for_types: bool  # inside `if TYPE_CHECKING:`


def check(path: str, source: str) -> list[str]:
    """The violations in a file, as ``path:line: uses NAME (RULE)``. ``path`` is relative to the checkout."""
    rules = [rule for rule in RULES if _applies(rule, path)]
    return [
        f"{path}:{use.line}: uses {use.name} ({rule.name})"
        for use in sorted(set(_uses(path, ast.parse(source))), key=lambda use: (use.line, use.name))
        for rule in rules
        if (rule.for_types_too or not use.for_types)
        and _inside(use.name, rule.banned)
        and not _inside(use.name, rule.allowed)
    ]


def _applies(rule: Rule, path: str) -> bool:
    return bool(re.match(rule.where, path)) and not (rule.except_in and re.match(rule.except_in, path))


def _inside(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def _uses(path: str, tree: ast.Module) -> Iterator[Use]:
    for_types = _for_types(tree)
    meanings = {}
    for alias, local, imported in _imports(path, tree):
        # `import os.path` gives the file the name os, which means os
        meanings[local] = local if imported.startswith(f"{local}.") else imported
        yield Use(imported, alias.lineno, id(alias) in for_types)
    parts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in parts and (name := _dotted(node)):
            first, dot, rest = name.partition(".")
            if first in meanings or hasattr(builtins, first):
                meaning = f"{meanings.get(first, first)}{dot}{rest}".removeprefix("builtins.")
                yield Use(meaning, node.lineno, id(node) in for_types)
        if isinstance(node, ast.Attribute):
            yield Use(f".{node.attr}", node.lineno, id(node) in for_types)
        if isinstance(node, ast.keyword) and node.arg and not _is_off(node.value):
            yield Use(f"{node.arg}=", node.lineno, id(node) in for_types)


def _for_types(tree: ast.Module) -> set[int]:
    """The ``id`` of each node inside ``if TYPE_CHECKING:``."""
    blocks = [node for node in ast.walk(tree) if _is_type_checking(node)]
    return {id(inner) for block in blocks for statement in block.body for inner in ast.walk(statement)}


def _is_off(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value in (None, False)


def _is_type_checking(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and _dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports(path: str, tree: ast.Module) -> Iterator[tuple[ast.alias, str, str]]:
    """Every import: where it is, the name that it gives the file, and what is imported."""
    package = (PACKAGE, *Path(path).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias, alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            for alias in node.names:
                yield alias, alias.asname or alias.name, f"{module}.{alias.name}"


def _dotted(node: ast.expr) -> str | None:
    """``a.b.c`` for an attribute of an attribute of a name; None for any other expression."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            before = _dotted(value)
            return f"{before}.{name}" if before else None
        case _:
            return None


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The files that each file imports, inside functions too; ``sources``: their texts, by path.

    Left out are the imports for types only (inside ``if TYPE_CHECKING:``) of files in the same folder, and those of
    ``TYPES_ACROSS``: they may point back, so that no class is written a second time as a protocol that mirrors it.

    The front door of a package is its ``__init__.py``: ``from ..core import Actor`` imports that file, which imports
    the files of its package. So no file of a package may import from its own front door.
    """
    modules = {_module(path): path for path in sources}
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        tree = ast.parse(source)
        for_types = _for_types(tree)
        imported = {
            modules[module]
            for alias, _, name in _imports(path, tree)
            if (module := _longest_prefix(name, modules)) is not None
            and not (id(alias) in for_types and _may_point_back(path, modules[module]))
        }
        graph[path] = imported - {path}
    return graph


def _may_point_back(path: str, imported: str) -> bool:
    return PurePath(path).parent == PurePath(imported).parent or (path, imported) in TYPES_ACROSS


def import_cycle(sources: Mapping[str, str]) -> list[str]:
    """The files of one cycle, each imported by the next; empty without a cycle."""
    try:
        TopologicalSorter(import_graph(sources)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def against_the_order_of_core(sources: Mapping[str, str]) -> list[str]:
    """Imports of a part of core that stands after the importing one in ``CORE``, as ``path imports path``."""
    return [
        f"{path} imports {imported}"
        for path, imports in import_graph(sources).items()
        if path.startswith("core/") and path != "core/__init__.py"
        for imported in sorted(imports)
        if imported.startswith("core/") and _place_in_core(imported) > _place_in_core(path)
    ]


def _place_in_core(path: str) -> int:
    """Its index in ``CORE``; the front door comes after everything else."""
    part = PurePath(path).parts[1].removesuffix(".py")
    return len(CORE) if part == "__init__" else CORE.index(part)


def named_like_a_library(path: str, source: str) -> bool:
    """True if the file imports a library of its own name, so that the two look alike in an import or a traceback."""
    libraries = {name.partition(".")[0] for _, _, name in _imports(path, ast.parse(source))}
    return PurePath(path).stem in libraries - {PACKAGE}


def _module(path: str) -> str:
    parts = PurePath(path).with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _longest_prefix(name: str, modules: Mapping[str, str]) -> str | None:
    """The module that ``name`` is, or is in; None if it is not one of ``modules``."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None
