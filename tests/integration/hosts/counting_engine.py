"""An engine without a model: it answers each number with the next one."""

import asyncio

import numpy as np
from tokenizers import Tokenizer

from actors.generator.engine import AlwaysAwake
from actors.sampled import Sampled, nothing
from tests.integration.actors.actor_harness import next_number


class CountingEngine(AlwaysAwake):
    kv, full_step_s, frozen, version = "recomputed", 0.0, "", 0

    def __init__(self, model, pause_s=0.0):
        self._tokenizer, self._pause_s = Tokenizer.from_file(str(model / "tokenizer.json")), pause_s
        self._aborted = set()
        self.steps = 0

    async def generate(self, request):
        text = self._tokenizer.decode(request.prompt, skip_special_tokens=False)
        before, _, begun = text.rpartition("<assistant>")
        ids = self._tokenizer.encode(next_number(before)[len(begun) :], add_special_tokens=False).ids
        ids = [*ids, self._tokenizer.token_to_id("<eos>")]
        for number, token in enumerate(ids[: request.max_tokens]):
            await asyncio.sleep(self._pause_s)
            if request.id in self._aborted:
                yield nothing(finish_reason="abort")
                return
            self.steps += 1
            reason = (
                "stop" if number == len(ids) - 1 else "length" if number == request.max_tokens - 1 else ""
            )
            versions = np.full(1, self.version, "i4")
            yield Sampled(np.array([token], "i4"), np.array([-0.25], "f4"), versions, reason)

    async def abort(self, request_id):
        self._aborted.add(request_id)

    async def apply_weights(self, manifest, data):
        self.version = manifest.version
        return 0.0

    def health(self):
        return ""

    def gauges(self):
        return {}

    async def close(self):
        pass
