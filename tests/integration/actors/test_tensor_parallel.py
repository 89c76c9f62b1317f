"""Test a generator whose engine divides each layer among two processes, with real vLLM on CPU."""

import pytest

from actors.config import GeneratorConfig
from actors.generator.vllm_engine.plugin import is_registered
from tests.integration.actors.divided_checks import check_divided

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_divided_engine_is_the_policy_of_each_version_and_ends_with_a_killed_generator(tmp_path):
    assert is_registered(), "install the package again: pip install -e ."
    check_divided(GeneratorConfig(kv_cache_mb=64, tensor_parallel_size=2), tmp_path)
