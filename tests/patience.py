"""The patience of tests with things that should come at once, checked by `test_limits.py`."""

# Seconds; only a test that fails waits for so long. It is large: no test fails because the machine
# is slow or busy. pytest's own limit for a test (`--timeout` in pyproject.toml) is larger.
PATIENCE = 300.0
