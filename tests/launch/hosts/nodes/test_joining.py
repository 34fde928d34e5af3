"""The reasons for which a node is refused."""

from dataclasses import replace

import pytest

from flexmarl.core.protocol.session import DEFAULT_SETTINGS
from flexmarl.launch.hosts.nodes.joining import Head, Joining, NodeRefused, Offer, refusals

from ..placement.hosts import host

OFFER = Offer("/shared/runs/a", "/shared/recipe", DEFAULT_SETTINGS, {})
HEAD = Head(
    replace(host("head"), packages={"torch": "2.4", "flexmarl": "1.0"}),
    OFFER,
    {"workflow.py": "11", "parts/prompts.py": "22"},
    "tcp://10.0.0.1:4711",
)
FITS = Joining(replace(HEAD.host, name="b"), HEAD.recipe_files, HEAD.address, "")


def test_one_that_fits_is_taken() -> None:
    assert not list(refusals(HEAD, FITS))
    more = replace(FITS, recipe_files={**HEAD.recipe_files, "notes.py": "33"})
    assert not list(refusals(HEAD, more)), "nothing imports a file that the head has not"


def test_the_name_of_the_head_is_refused() -> None:
    twice = replace(FITS, host=replace(FITS.host, name="head"))
    (problem,) = [found for found in refusals(HEAD, twice) if "name" in found]
    assert "the head has the name head too" in problem and "--name" in problem


@pytest.mark.parametrize("name", ["a b/c", "a\x1b[2J", "\u202eb", "a\nb", "", "-x", "x" * 65])
def test_a_name_that_is_no_part_of_a_line_is_refused(name: str) -> None:
    (problem,) = refusals(HEAD, replace(FITS, host=replace(FITS.host, name=name)))
    assert problem.startswith(f"invalid name {name!r}: use 1 to 64 letters") and "another --name" in problem


def test_other_versions_are_refused_by_package() -> None:
    other = replace(FITS.host, python="3.12.1", packages={"torch": "2.5", "flexmarl": "1.0"})
    problems = list(refusals(HEAD, replace(FITS, host=other)))
    assert problems == [
        "Python must have one version on all hosts: 3.11 on head, 3.12 on b",
        "torch must have one version on all hosts: 2.4 on head, 2.5 on b",
    ]


@pytest.mark.parametrize(
    ("seen", "problem", "said"),
    [
        ("tcp://10.0.0.9:1", "", "it is another folder there"),
        ("", "No such file or directory", "No such file or directory"),
        (HEAD.address, "/shared/runs/a/logs can't be written", "can't be written"),
    ],
)
def test_a_folder_that_is_not_shared_is_refused(seen: str, problem: str, said: str) -> None:
    (found,) = refusals(HEAD, replace(FITS, seen_address=seen, folder_problem=problem))
    assert found.startswith("/shared/runs/a, the run's folder, is not shared with b: ") and said in found


def test_another_recipe_is_refused_by_file() -> None:
    (found,) = refusals(HEAD, replace(FITS, recipe_files={"workflow.py": "12"}))
    assert found == (
        "the recipe /shared/recipe is not the same on b: workflow.py differs, parts/prompts.py is missing; "
        "copy it there"
    )
    error = NodeRefused("b", [found, found])
    assert str(error).count("workflow.py differs") == 2 and error.node == "b"
