"""Functions that a config names: in a file of the recipe's folder, or in a module."""

import sys
from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.recipe.named_function import named_function


def test_a_function_of_a_file_and_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flexmarl_named.py").write_text("def double(number): return 2 * number\n")
    assert named_function(tmp_path, "flexmarl_named.py:double")(3) == 6
    assert named_function(tmp_path, "operator:neg")(3) == -3
    assert named_function(tmp_path, "os.path:basename")("a/b") == "b"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert named_function(tmp_path, "flexmarl_named:double")(4) == 8
    monkeypatch.delitem(sys.modules, "flexmarl_named")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere.py:double", r"nowhere\.py does not exist"),
        ("nowhere_at_all:double", "Python finds no module 'nowhere_at_all'"),
        ("os.nowhere:double", "Python finds no module 'os.nowhere'"),
        ("operator:nowhere", "operator has no function 'nowhere'"),
        ("math:pi", "math has no function 'pi'"),
    ],
)
def test_a_missing_one_has_a_sentence(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        named_function(tmp_path, name)


def test_an_error_of_the_module_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flexmarl_broken.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("flexmarl_broken.py:x", "flexmarl_broken:x"):
        with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
            named_function(tmp_path, name)
