"""The newest grant of each writer: found by its number, and the same when its records are read again."""

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.segments.segments import SegmentGrant
from flexmarl.actors.store.grants import GRANT, Grants, grant_record, seal_record


def read(records: list[bytes]) -> Grants:
    grants = Grants()
    for record in records:
        kind, *fields = msgpack.unpackb(record)
        grants.read(kind, fields)
    return grants


def test_only_the_newest_number_of_a_writer_is_found() -> None:
    grants = Grants()
    first, second = SegmentGrant("m1", 10), SegmentGrant("m2", 20)
    grants.add("a", 0, first)
    assert grants.find("a", 0) == first
    assert grants.find("a", 1) is None and grants.find("b", 0) is None
    grants.add("a", 1, second)
    assert (grants.find("a", 0), grants.find("a", 1)) == (None, second)
    grants.retire("a")
    assert grants.find("a", 1) is None


def test_a_record_without_a_number_names_the_writer_alone() -> None:
    grants = read([msgpack.packb([GRANT, "a", "m1", 10])])
    assert (grants.writers, grants.sizes) == ({"m1": "a"}, {"m1": 10}) and grants.find("a", 0) is None


writers = st.sampled_from("ab")
steps = st.tuples(st.sampled_from(["grant", "seal"]), writers)


@given(st.lists(steps, max_size=30))
def test_the_state_is_the_same_after_the_journal_is_read_and_after_it_is_compacted(
    steps: list[tuple[str, str]],
) -> None:
    grants, records, granted = Grants(), list[bytes](), dict[str, str]()
    numbers = dict.fromkeys("ab", 0)
    for step, writer in steps:
        segments = [segment for segment, of in granted.items() if of == writer]
        if step == "grant":
            grant = SegmentGrant(f"m{len(records)}", 4096)
            grants.add(writer, numbers[writer], grant)
            records.append(grant_record(writer, numbers[writer], grant))
            numbers[writer] += 1
            granted[grant.segment] = writer
        else:
            records.append(seal_record(writer, segments[:-1]))
            for segment in segments[:-1]:
                del granted[segment]
    asked = [(writer, number) for writer, last in numbers.items() for number in range(last + 1)]
    for after in (read(records), read(list(grants.records(granted)))):
        assert after.writers == granted
        assert {name: after.sizes[name] for name in granted} == dict.fromkeys(granted, 4096)
        assert [after.find(*one) for one in asked] == [grants.find(*one) for one in asked]
