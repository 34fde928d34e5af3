"""Numbers and changes in words."""

from flexmarl.launch.monitoring.formatting import change, compact, duration


def test_a_change_in_words() -> None:
    assert change(0.041, 0.934, ".1%") == "rose from 4.1% to 93.4%"
    assert change(0.5, 0.25, ".3f") == "fell from 0.500 to 0.250"
    assert change(0.5, 0.50001, ".1%") == "stayed at 50.0%"


def test_numbers_in_words() -> None:
    assert [compact(x) for x in (0, 0.01234, 999.9, 14400, 2_000_000, 3e9)] == [
        "0",
        "0.0123",
        "1k",
        "14.4k",
        "2M",
        "3G",
    ]
    assert [duration(x) for x in (0.012, 35.1, 125, 11220)] == [
        "0.012 s",
        "35.1 s",
        "2 min 05 s",
        "3 h 07 min",
    ]
