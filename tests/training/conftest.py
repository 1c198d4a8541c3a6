"""One thread of compute: small models are slower on two, and several processes share this machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
