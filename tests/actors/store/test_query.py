"""Questions in SQL about the rows: what they answer, and what they may not do."""

from typing import Any

import pytest

from flexmarl.actors.errors import StoreError
from flexmarl.actors.messages import Selection
from flexmarl.actors.store.query import select

COLUMNS = {
    "agent": "str",
    "sample_id": "str",
    "group": "str",
    "reward": "float",
    "solved": "bool",
    "turns": "int",
}
ROWS: list[tuple[Any, ...]] = [
    ("solver", "1:q_0_0", "1:q", 0.25, False, 1),
    ("checker", "1:q_1_0", "1:q", 0.75, True, 2),
    ("checker", "1:it's_1_1", "1:it's", 1.0, None, 3),
    ("solver", "2:q_0_0", "2:q", None, True, 2**62),
]


def ask(where: str, **how: Any) -> Selection:
    return select(COLUMNS, ROWS, where, **how)


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("", [0, 1, 2, 3]),
        ("reward > 0.5 and agent = 'checker'", [1, 2]),
        ("reward is null", [3]),
        ("group = '1:q'", [0, 1]),
        ("\"group\" = '1:it''s' or Group = '2:q'", [2, 3]),
        ("sample_id = 'group'", []),
        ("solved", [1, 3]),
        ("reward between 0.2 and 0.8 -- a comment", [0, 1]),
        ("sample_id like '1:%' and length(agent) = 6", [0]),
        ("reward < (select AVG(reward) from samples)", [0]),
        ("agent in ('solver', 'planner')", [0, 3]),
    ],
)
def test_rows_come_in_their_order_as_plain_data(where: str, found: list[int]) -> None:
    answer = ask(where)
    assert answer.rows == [dict(zip(COLUMNS, ROWS[place], strict=True)) for place in found]
    assert answer.total == len(found)
    assert all(type(row["solved"]) in (bool, type(None)) for row in answer.rows)


@pytest.mark.parametrize(
    "where", ["order > 1", "Order > 1", '"order" > 1', '"in" = 3 and length > 3', "length(agent) = 6"]
)
def test_columns_may_be_named_as_sql_names_things(where: str) -> None:
    columns = {"agent": "str", "order": "int", "in": "int", "length": "int"}
    assert select(columns, [("solver", 2, 3, 4), ("judge", 1, 1, 1)], where).total == 1


def test_a_limit_returns_the_total_too() -> None:
    answer = ask("turns > 0", limit=1)
    assert [row["sample_id"] for row in answer.rows] == ["1:q_0_0"]
    assert answer.total == 4


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("rewrad > 1", "there is no column rewrad; there are: agent, sample_id, group, reward"),
        ('agent = "checker"', r"there is no column \"checker\" \(text is quoted as 'checker'\); there are"),
        ("reward >", "is invalid: .*syntax error"),
        ("1); drop table samples; --", "is invalid"),
        ("1; select 1", "is invalid"),
        ("reward > \0", "is invalid"),
        ("agent = '\ud800'", "is invalid"),
        ("sum(reward) > 1", "is invalid: misuse of aggregate"),
        ("reward > ?", "is invalid"),
        ("x" * 10_001, "10001 characters is over the limit"),
    ],
)
def test_a_wrong_expression_is_explained(where: str, why: str) -> None:
    with pytest.raises(StoreError, match=f"(?s){why}"):
        ask(where)


@pytest.mark.parametrize(
    "where",
    [
        "(select count(*) from sqlite_master)",
        "(select 1 from sqlite_schema)",
        "(select 1 from pragma_database_list)",
        "(select value from json_each('[1]'))",
        "load_extension('x')",
        "randomblob(100000000) is null",
        "zeroblob(100000000) is null",
        "printf('%100000000d', 1) = ''",
        "readfile('/etc/passwd') is null",
        "(with recursive n(x) as (select 1 union all select x + 1 from n) select max(x) from n)",
        "1) union select * from sqlite_master where (1",
    ],
)
def test_only_the_samples_can_be_read(where: str) -> None:
    with pytest.raises(StoreError, match=r"may only read the table samples, with the functions abs, avg"):
        ask(where)


def test_an_expression_that_takes_too_long_is_ended() -> None:
    rows = [("a", str(n), "g", 0.0, True, n) for n in range(300)]
    where = "(select count(*) from samples a, samples b, samples c, samples d) > 0"
    with pytest.raises(
        StoreError, match=r"took longer than 0.05 s, the most that the store spends on one: narrow it"
    ):
        select(COLUMNS, rows, where, timeout_s=0.05)


def test_long_values_are_not_made() -> None:
    doubled = "agent"
    for _ in range(9):
        doubled = f"({doubled} || {doubled})"
    with pytest.raises(StoreError, match="is invalid: string or blob too big"):
        select(COLUMNS, [("x" * 4096, "i", "g", 0.0, True, 1)], f"length({doubled}) > 0")
