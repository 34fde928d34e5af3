"""``torchrun --nnodes N --nproc-per-node M -m flexmarl.launch.torchrun RECIPE [KEY=VALUE]...``"""

import sys

from .rank import main

if __name__ == "__main__":
    sys.exit(main())
