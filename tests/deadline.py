"""Ends a session in time: tests that would begin after ``FLEXMARL_TESTS_END``, seconds since the epoch, are left out.

CI's second pass has an end: on a machine with half the speed it tries less, in place of CI failing as a whole.
"""

import os
import time

import pytest


class DeadlinePlugin:
    def __init__(self) -> None:
        self._end = float(os.environ.get("FLEXMARL_TESTS_END", "inf"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.time() > self._end:
            pytest.skip("the time of this session was over (FLEXMARL_TESTS_END)")
