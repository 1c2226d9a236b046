"""Secrets for tests: farcall takes none that look made up."""

from __future__ import annotations

SECRET = "2b5de0460e88d26d037cda4c1a06ce12"
OTHER_SECRET = "bd49c66a254a9e6e8e7b93c30ee4a5ea"
