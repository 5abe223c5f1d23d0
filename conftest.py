"""Settings of every test process, made before anything imports torch."""

import os

# Tests are many small processes on shared machines: threads that spin for each other would make them crawl there.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

try:
    from hypothesis import settings
except ImportError:  # a package's tests without properties
    pass
else:
    # A busy machine is no failure, and every run tries the same examples: HYPOTHESIS_PROFILE=search looks for new ones.
    settings.register_profile("deepinfer", deadline=None, derandomize=True)
    settings.register_profile("search", deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deepinfer"))
