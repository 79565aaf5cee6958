"""Tiny random models of every architecture that can be split, and the embedded policy."""

from dataclasses import replace

import pytest

from tests.support.stage_models import embedded, models

__all__ = ["embedded", "models"]


@pytest.fixture
def policy(models, embedded):
    """kind → a policy of that model, with the embedded one's tokenizer cut to its vocabulary."""

    def build(kind):
        if kind == "embedded":
            return embedded.clone()
        return replace(embedded, model=models[kind]).clone()

    return build
