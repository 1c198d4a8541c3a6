"""One compute thread: small models are slower with two, and several processes share the machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
