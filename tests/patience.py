"""How long tests wait for what should come at once. `tests/unit/test_limits.py` checks its use."""

# Seconds; only a test that fails waits for so long. It is large: no test fails because the machine
# is slow or busy. pytest's own limit for a test (`--timeout` in pyproject.toml) is larger.
PATIENCE = 300.0
