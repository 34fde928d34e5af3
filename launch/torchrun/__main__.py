"""``torchrun --nnodes N --nproc-per-node M -m flexmarl.launch.torchrun RECIPE [KEY=VALUE]...``"""

import sys

from ..hosts.search_path import leave_working_directory

leave_working_directory()

from .rank import main  # noqa: E402  # it imports much

if __name__ == "__main__":
    sys.exit(main())
