"""A module that starts a thread when it is imported, and says when its process is forked."""

import os
import sys
import threading

threading.Thread(target=threading.Event().wait, name="endless", daemon=True).start()
os.register_at_fork(before=lambda: sys.stderr.write("forked beside a thread\n"))
