"""Versions that are adapters (LoRA) in vLLM's CPU engine: each token is of the version that it claims.

The policy of version v is the model with adapter v merged, computed by transformers without vLLM and without PEFT.
"""

import pytest
import torch

from actors.config import GeneratorConfig
from protocol.weights.files import write_version
from protocol.weights.format import ADAPTER_DOWN, ADAPTER_UP
from tests.integration.actors.engine_checks import NEVER, PROMPT, Lab, check_spans, check_updated
from tests.integration.learner.tiny_qwen3 import publish, tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RANK = 4
CONFIG = GeneratorConfig(kv_cache_mb=64, adapter_rank=RANK)


def adapter(version, layers):
    """Return the factors of a version. They change the policy by nats."""
    generator = torch.Generator().manual_seed(version)

    def random(*shape):
        return 0.3 * torch.randn(*shape, generator=generator)

    return {
        name: tensor
        for path, (outputs, inputs) in layers.items()
        for name, tensor in (
            (path + ADAPTER_DOWN, random(RANK, inputs)),
            (path + ADAPTER_UP, random(outputs, RANK)),
        )
    }


class Adapted:
    """The policies of versions: one model, with the adapter of each version merged into it."""

    def __init__(self, policies):
        self._largest_error, self._merged = type(policies).largest_error, {}
        base = tiny_model(seed=0, tied=True)
        named = base.named_modules()
        self.layers = {
            n: tuple(m.weight.shape) for n, m in named if isinstance(m, torch.nn.Linear) and n != "lm_head"
        }

    def __getitem__(self, version):
        if version not in self._merged:
            model = self._merged[version] = tiny_model(seed=0, tied=True)
            factors = adapter(version, self.layers) if version else {}
            with torch.no_grad():
                for path in self.layers if version else ():
                    up, down = factors[path + ADAPTER_UP], factors[path + ADAPTER_DOWN]
                    model.get_submodule(path).weight += up @ down
        return self._merged[version]

    def largest_error(self, prompt, answer):
        return self._largest_error(self, prompt, answer)


class AdapterLab(Lab):
    """A generator that takes adapters."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.policies = Adapted(self.policies)

    def publish(self, **flaws):
        self.version += 1
        if flaws:
            return publish(self.policies[self.version], self.root, version=self.version), self.version
        factors = adapter(self.version, self.policies.layers)
        manifest = write_version(
            self.root,
            run="test",
            epoch=0,
            version=self.version,
            shapes={name: ("F32", tuple(t.shape)) for name, t in factors.items()},
            tensors=((name, memoryview(t.contiguous().numpy()).cast("B")) for name, t in factors.items()),
        )
        return manifest, self.version


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = AdapterLab(CONFIG, tmp_path_factory.mktemp("adapters"), tied=True)
    yield lab
    lab.close()


def test_version_0_is_the_model_without_an_adapter(lab):
    answer = lab.running.ask(lab.running.actor("first"), "first", PROMPT, stop_token_ids=NEVER)
    assert set(answer.versions) == {lab.version}
    lab.assert_sampled_by_claimed_versions(PROMPT, answer)


def test_adapters_change_in_mid_sequence_and_every_token_says_which(lab):
    check_spans(lab)


def test_after_an_update_no_stale_prefix_is_read(lab):
    check_updated(lab)


def test_whole_weights_are_refused_by_a_generator_that_takes_adapters(lab):
    in_service, refused = lab.running.broker.beat.policy_version, lab.gauge("updates_refused_total")
    manifest, bad = lab.publish(whole=True)
    lab.running.broker.announce(manifest, version=bad)
    lab.running.until(lambda: lab.gauge("updates_refused_total") == refused + 1)
    answer = lab.running.ask(lab.running.actor("bad"), "bad", PROMPT, stop_token_ids=NEVER)
    assert set(answer.versions) == {in_service}
    lab.assert_sampled_by_claimed_versions(PROMPT, answer)
