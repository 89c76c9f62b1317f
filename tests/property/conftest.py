"""A busy machine is not a fault: examples have no deadline."""

from hypothesis import settings

settings.register_profile("offbeat", deadline=None)
settings.load_profile("offbeat")
