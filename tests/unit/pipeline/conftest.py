"""Tiny random models of every architecture that can be split, and the embedded policy."""

from tests.support.stage_models import embedded, models

__all__ = ["embedded", "models"]
