"""Examples have no deadline, because a busy machine is not a fault."""

from hypothesis import settings

settings.register_profile("offbeat", deadline=None)
settings.load_profile("offbeat")
