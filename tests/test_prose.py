"""The rules for plain words, checked on docstrings, comments, texts in the code, scripts and pages.

The rules are data, at the top; ``check`` applies them to a file. The last tests run the checker on small bad and good
samples. ``python -P tests/test_prose.py core/wire README.md`` prints the violations of folders and files.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "transport", "actors", "launch", "scripts", "tests", ".ci")
FILES = ("README.md", "pyproject.toml")
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".sh", ".html", ""}  # "": scripts/check and the like
EXCLUDED = ("tests/test_prose.py",)  # its samples break the rules on purpose

FIRST_WORDS = (
    "how", "of", "until", "what", "whatever", "when", "where", "whether", "which", "who", "whoever", "whom", "whose",
    "why",
)  # fmt: skip
FIRST_WORD_RULE = "a docstring begins with a verb or a noun"


@dataclass(frozen=True)
class Rule:
    """Text that matches one of ``patterns`` is a violation. A blank in a pattern matches a line break too."""

    name: str
    patterns: tuple[str, ...]


SENTENCE = r"(?:^|[.;:!?] |\n\n)"  # the end of the sentence before, or of a paragraph
PREPOSITION = r"\b(?:about|after|at|before|by|for|from|in|of|on|than|to|with)"
FREE_RELATIVE_VERBS = "is|are|was|were|has|have|had|came|comes|follows|fails|failed|ends|ended|waits|needs"

RULES = (
    Rule(
        "say: invalid, missing, unknown, or: there is no x",
        (
            r"(?<![Tt]here )\b(?:is|are|was|were) none\b",
            r"(?<![Tt]here )\b(?:is|are|was|were) no "
            r"(?!longer\b|more\b|less\b|later\b|earlier\b|other\b|older\b|newer\b|\w+er than\b)\w+",
            r"\bnone other\b",
        ),
    ),
    Rule(
        "say: notify, log, report, raise, pass, give",
        (r"\btold\b", r"\btells?\b(?! (?:[^.]{1,80} )?(?:from|apart)\b)(?= \w)"),
    ),
    Rule(
        "say: continue, resume",
        (r"\b(?:go|goes|going|gone|went) on\b", r"\bcarr(?:y|ies|ied) on\b(?! (?:standard|one|its)\b)"),
    ),
    Rule("say: again, or: a new x", (r"\banew\b",)),
    Rule(
        "name the subject",
        (r"\b(?:no|some|any|every)body\b", r"\bwho(?:m)?ever\b", r"\bwhatever\b", r"\bthose who\b"),
    ),
    Rule(
        "no free relative: name the thing that does it, or to which it is done",
        (
            rf"{SENTENCE}(?:What|Who|Whom)\b(?![^.?]*\?)",
            r"[,;:] (?:who|whom) (?!\w+ \w+ \w+\?)\w+s (?:is|are|gets|has|may|must|will)\b",
            rf"(?:{PREPOSITION}|\b(?:and|or|but)) who\b",
            rf"{PREPOSITION} what (?:{FREE_RELATIVE_VERBS})\b",
            r"\bwhat (?:is|was|are|were) (?:asked|said|told)\b",
            r"\bwho waits?\b",
        ),
    ),
    Rule(
        "if for conditions, where for places",
        (
            r"\b[Rr]aises? [^.]{0,160}?\bwhere\b",
            r"\b(?:None|True|False|nothing|empty|only|except|even|also) where\b",
            r"\bwhere (?:there (?:is|are|was|were)|nothing|none|no|neither|not)\b",
            r"\bwhere (?:it|they|one|that|this) (?:do|does|did|has|have|had|can|could|would|fails|failed)\b",
            rf"{SENTENCE}Where (?!to\b)(?=[^.?;:]*,)",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A piece of prose of a file. ``line`` is that of its beginning."""

    line: int
    text: str
    docstring: bool = False
    one_line: bool = False  # line breaks in it are not the file's


def check(path: str, source: str) -> list[str]:
    """The violations in a file, as ``path:line: text (rule)``. ``path`` is relative to the checkout."""
    found = []
    for text in _texts(path, source):
        plain = _plain(text.text)
        ends = {match.end(): rule.name for rule, pattern in COMPILED for match in pattern.finditer(plain)}
        if text.docstring and (first := FIRST_WORD.match(plain)):
            ends[first.end()] = FIRST_WORD_RULE
        for end, rule in ends.items():
            line = text.line + (0 if text.one_line else plain.count("\n", 0, end))
            around = " ".join(plain[max(0, end - 50) : end + 40].split())
            found.append((line, end, f"{path}:{line}: {around} ({rule})"))
    return [violation for *_, violation in sorted(found)]


FIRST_WORD = re.compile(rf"\s*(?:{'|'.join(FIRST_WORDS)})\b", re.IGNORECASE)
COMPILED = [(rule, re.compile(pattern.replace(" ", r"\s"))) for rule in RULES for pattern in rule.patterns]


def _plain(text: str) -> str:
    """The text with one blank between words, the file's line breaks, and ``X`` for each piece of code."""
    lines = "\n".join(re.sub(r"[ \t]+", " ", line.strip()) for line in text.split("\n"))
    return re.sub(r"(`+)[^`]+\1", lambda code: "X" + "\n" * code.group().count("\n"), lines)


def _texts(path: str, source: str) -> Iterator[Text]:
    match Path(path).suffix:
        case ".py":
            yield from _texts_of_python(source)
        case ".md":
            yield from _texts_of_page(source)
        case _:
            yield from _paragraphs(1, [re.sub(r"^\s*#+!?", "", line) for line in source.splitlines()])


def _texts_of_python(source: str, first_line: int = 1) -> Iterator[Text]:
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    inner = {
        id(part)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant)
    }
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield Text(first_line - 1 + node.lineno, "".join(map(str, parts)), one_line=True)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            line = first_line - 1 + node.lineno
            if id(node) in docstrings:
                yield Text(line, node.value, docstring=True)
            elif " " in node.value:  # words for people: names, keys and formats have no blanks
                yield Text(line, node.value, one_line=True)
    yield from _comments(source, first_line)


# The tokenizer, which is written in Python, takes twenty times as long to find the comments.
STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|#[^\n]*',
    re.DOTALL,
)


def _comments(source: str, first_line: int) -> Iterator[Text]:
    """Trailing comments, and blocks of comment lines as one text each."""
    block: list[str] = []
    last = 0
    position, line = 0, first_line
    for match in STRING_OR_COMMENT.finditer(source):
        start = match.start()
        if source[start] != "#":
            continue
        line += source.count("\n", position, start)
        position = start
        text = match[0].lstrip("#:!")
        alone = not source[source.rfind("\n", 0, start) + 1 : start].strip()
        if block and not (alone and line == last + 1):
            yield Text(last - len(block) + 1, "\n".join(block))
            block = []
        if alone:
            block.append(text)
            last = line
        else:
            yield Text(line, text)
    if block:
        yield Text(last - len(block) + 1, "\n".join(block))


def _texts_of_page(source: str) -> Iterator[Text]:
    """Paragraphs, list items, table rows and headings of Markdown; code blocks by their language."""
    prose: list[str] = []
    lines = source.splitlines()
    number = 0
    while number < len(lines):
        fence = re.match(r"\s*```(\w*)", lines[number])
        if fence is None:
            alone = bool(re.match(r"\s*(#|\||[-*] |\d+\. )", lines[number]))
            prose.extend(["\0", lines[number]] if alone else [lines[number]])
            number += 1
            continue
        yield from _paragraphs(number + 1 - sum(line != "\0" for line in prose), prose)
        prose = []
        end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
        block = "\n".join(lines[number + 1 : end])
        if fence[1] == "python":
            yield from _texts_of_python(block + "\n", number + 2)
        else:
            yield from (Text(number + 2 + n, line) for n, line in enumerate(block.split("\n")))
        number = end + 1
    yield from _paragraphs(number + 1 - sum(line != "\0" for line in prose), prose)


def _paragraphs(first_line: int, lines: list[str]) -> Iterator[Text]:
    """Lines between empty ones as one text each. ``\\0`` ends a paragraph and is not a line of the file."""
    block: list[str] = []
    number = first_line
    for line in [*lines, ""]:
        if line == "\0" or not line.strip():
            if block:
                yield Text(number - len(block), "\n".join(block))
            block = []
        else:
            block.append(line)
        number += line != "\0"


def _sources(root: Path, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The files under folders and files of a checkout, as their names and texts."""
    for name in names:
        for path in sorted((root / name).rglob("*")) if (root / name).is_dir() else [root / name]:
            short = path.relative_to(root).as_posix()
            linked = path.is_symlink() or any(
                folder.is_symlink() for folder in path.relative_to(root).parents
            )
            skipped = linked or "__pycache__" in path.parts or short in EXCLUDED
            if path.suffix in SUFFIXES and path.is_file() and not skipped:
                yield short, path.read_text()


def test_the_prose_keeps_the_rules() -> None:
    files = list(_sources(ROOT, (*FOLDERS, *FILES)))
    violations = [line for path, text in files for line in check(path, text)]
    assert not violations, "\n".join(["", *violations])


def test_all_kinds_of_files_are_found() -> None:
    found = {path for path, _ in _sources(ROOT, (*FOLDERS, *FILES))}
    assert {
        "README.md", "pyproject.toml", ".ci/run", "scripts/check", "scripts/lib.sh", "core/system.py",
        "launch/recipes/sort_digits/config.yaml", "launch/monitoring/page/web/index.html", "tests/test_layers.py",
        "scripts/src/flexmarl/__init__.py",
    } <= found  # fmt: skip
    assert "tests/test_prose.py" not in found
    assert not [path for path in found if path.startswith("scripts/src/flexmarl/core")]


# Sources that break each rule; #! marks the lines to be found.
BAD = [
    ("x.py", '"""Who lives and dies with whom."""  #!'),
    ("x.py", 'def f():\n    """Whether it is there."""  #!'),
    ("x.py", 'class A:\n    x: int\n    """Of no use."""  #!'),
    ("x.py", 'def f():\n    """Reads it.\n\n    Raises ValueError where it is late.  #!\n    """'),
    ("x.py", 'def f():\n    """Reads it, and\n    goes\n    on."""  #!'),
    ("x.py", "# a name that\n# is\n# none  #!"),
    ("x.py", "x = 1  # told in time #!\n# fine"),
    ("x.py", "x = 1  # fine\n# made anew #!\n\n# fine"),
    ("x.py", "x = '#fine\\\\'  # told #!"),
    ("x.py", "raise ValueError(f'{name!r} is no name')  #!"),
    ("x.py", "raise ValueError(  # fine\n    'fine, but '  #!\n    'is none'\n)"),
    ("x.py", "# these are none #!"),
    ("x.py", "# the step is no step of the run #!"),
    ("x.py", "# exactly these, none other #!"),
    ("x.py", "# tells the caller #!"),
    ("x.py", "# it can tell whether the peer is there #!"),
    ("x.py", "# a turn is carried on #!"),
    ("x.py", "# the run went on #!"),
    ("x.py", "# for whatever it is #!"),
    ("x.py", "# for whoever asks #!"),
    ("x.py", "# read by nobody #!"),
    ("x.py", "# for those who read #!"),
    ("x.py", "# What is under way is kept. #!"),
    ("x.py", "# It stays. Who asks for it waits. #!"),
    ("x.py", "# nothing is lost; who asks gets an error #!"),
    ("x.py", "# for who compares nothing #!"),
    ("x.py", "# in proportion to what is remembered #!"),
    ("x.py", "# the answer to what was asked #!"),
    ("x.py", "# does what is asked #!"),
    ("x.py", "# the caller who waits #!"),
    ("x.py", "# None where it is not known #!"),
    ("x.py", "# raises ValueError in that case, and TypeError\n# where #!\n# it is another"),
    ("x.py", "# stops where there is none #!"),
    ("x.py", "# fails where it has ended #!"),
    ("x.py", "# Where the run has ended, it fails. #!"),
    ("x.md", "# Heading\n\nOne\ntwo told #!\n\nthree"),
    ("x.md", "- one\n- told #!\n- three"),
    ("x.md", "| one | two |\n|---|---|\n| told | #! |\n"),
    ("x.md", "text\n\n```python\nx = 1\n# made anew #!\n```\n\ntold #!"),
    ("x.md", "```yaml\nx: 1  # made anew #!\n```\n"),
    ("x.yaml", "# fine\nx: 1  # made anew #!\n"),
    ("scripts/run", "#!/bin/sh\nsay 'there is no x'\n\nsay 'it is no x' #!\n"),
]

GOOD = [
    ("x.py", '"""The waiter for a reply: a future, say. Its owner is the one who asked."""'),
    ("x.py", '"""Returns whether it is there, or where it lies."""'),
    ("x.py", "x = 'nobody'\ny = {'told': 1}\nbody = anything.who"),
    ("x.py", "x = None  # there is no such file, there are none; it is no longer there, no newer than that"),
    ("x.py", "# ``tell`` is one-way; `goes on` is code"),
    ("x.py", "# tells a late request from a duplicate; tells the two apart"),
    ("x.py", "# is None"),
    ("x.py", "x = ['#told', '\\'#told', r'#anew']"),
    (
        "x.py",
        "# What is it? Who knows? The folder where it lies. Raises ValueError if it is late. There may be none.",
    ),
    ("x.py", "# see where it is and what it does"),
    ("x.md", "## Where to go\n\nThe place where it is. `told` and `anew`.\n\n```\ntext\n```\n"),
    ("x.yaml", "# There is no x.\nx: 1\n"),
]


@pytest.mark.parametrize(("path", "source"), BAD)
def test_the_checker_finds_a_violation(path: str, source: str) -> None:
    marked = {
        number for number, line in enumerate(source.splitlines(), 1) if "#!" in line and "#!/" not in line
    }
    found = check(path, source)
    assert {int(line.split(":")[1]) for line in found} == marked, found


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_the_checker_finds_nothing_else(path: str, source: str) -> None:
    assert check(path, source) == []


@pytest.mark.parametrize("pattern", [pattern for _, pattern in COMPILED], ids=lambda pattern: pattern.pattern)
def test_every_pattern_has_been_seen_to_match(pattern: re.Pattern[str]) -> None:
    assert any(pattern.search(_plain(text.text)) for path, source in BAD for text in _texts(path, source))


def test_a_violation_is_named_by_file_line_and_rule() -> None:
    assert check("core/x.py", "\n# made anew") == ["core/x.py:2: made anew (say: again, or: a new x)"]


if __name__ == "__main__":
    here = Path.cwd()
    names = tuple(Path(name).resolve().relative_to(here).as_posix() for name in sys.argv[1:])
    lines = [line for path, text in _sources(here, names or (*FOLDERS, *FILES)) for line in check(path, text)]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.exit(bool(lines))
