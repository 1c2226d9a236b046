"""Fixtures that several of these tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from collector import frozen  # noqa: F401  # a fixture

from farcall.serde import Serializer, serializer


@pytest.fixture(scope="module", params=["compiled", "python"])
def halves(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run all tests of the module twice: with the serializers' compiled half, and without."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(serializer, "accelerator", lambda *args: None)
            for value in vars(request.module).values():
                if isinstance(value, Serializer):
                    patch.setattr(value, "plain", None)
        yield
