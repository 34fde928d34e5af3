"""Output whose reader leaves."""

import os

from flexmarl.launch.monitoring.console.lossy_output import LossyOutput


def test_a_reader_that_leaves_is_not_missed() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", buffering=1) as stream, os.fdopen(reading) as reader:
        output = LossyOutput(stream)
        output.write("heard\n")
        output.flush()
        assert reader.readline() == "heard\n"
        reader.close()
        for _ in range(3):
            assert output.write("into nothing\n") == 13
            output.flush()


def test_the_rest_is_the_streams_own() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as stream, os.fdopen(reading):
        output = LossyOutput(stream)
        assert output.encoding == "utf-8" and output.fileno() == writing and not output.isatty()
