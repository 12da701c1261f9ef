"""Settings of all tests. Being here also puts `fakes.py` on the import path."""

from hypothesis import HealthCheck, settings

# Shared machines are slow at times; how long an example takes is not what we test.
settings.register_profile(
    "seedrelay", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("seedrelay")
