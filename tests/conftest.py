"""Settings of all tests: one thread per process, no model hub, DeepSpeed on the CPU, no deadline for examples."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

# A busy machine is not a fault.
settings.register_profile("offbeat", deadline=None)
settings.load_profile("offbeat")
