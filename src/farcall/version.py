"""The version of farcall, and the only place that has it: the build reads it from here."""

from __future__ import annotations

VERSION = "0.1.0"
