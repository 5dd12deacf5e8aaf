"""Fixtures of all tests, which run offline and on one thread."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from tiny import FAMILIES, make_target

torch.set_num_threads(1)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def target(family):
    return make_target(family)
