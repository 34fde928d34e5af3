"""The driver that a build of PyTorch needs."""

import torch

from flexmarl.launch.hosts.cuda_build import cuda_in, cuda_of_torch, driver_problem


def test_the_version_is_read_from_the_file_that_pytorch_writes() -> None:
    assert cuda_of_torch() == (torch.version.cuda or "")
    assert cuda_in("debug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n") == "13.0"
    assert (
        cuda_in("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n") == ""
    )


def test_a_driver_that_is_too_old_is_named_with_the_least_one() -> None:
    assert "needs the driver 580 or later, and 570.86.10 is installed" in driver_problem("13.0", "570.86.10")
    assert (
        driver_problem("13.0", "580.159.04") == driver_problem("13.0", "") == driver_problem("", "1.0") == ""
    )
