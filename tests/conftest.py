"""Settings of the whole suite."""

from hypothesis import settings

# A slow or busy machine is no failure; what must be fast is timed by its own test.
settings.register_profile("halfstep", deadline=None)
settings.load_profile("halfstep")
