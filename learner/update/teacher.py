"""A teacher behind an OpenAI-compatible URL: the log-probabilities that it gives to sampled tokens.

It stands beside `learner.update.policy.FrozenPolicy`, which is a teacher that the learner holds itself.
"""

import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.errors import ModelUnusable, TeacherFailed
from learner.settings.distillation import Distillation
from learner.update.batch import Batch
from learner.update.micro_batches import MicroBatch
from protocol.arrays import Float32s

RETRY_S = 0.5
"""Wait before the first repetition of a request; each further wait is twice as long."""
AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which a request is repeated."""
MOST_BYTES = 64 << 20
"""Largest body of an answer."""
SHOWN_CHARS = 200


class RemoteTeacher:
    """Asks a server for the log-probabilities of the tokens of a batch, at temperature 1.

    The request is one of the completions interface: the tokens as the prompt, with ``echo`` and ``logprobs``.

    Args:
        config: URL, model and limits.
        device: device on which the learner computes.
    """

    def __init__(self, config: Distillation, device: torch.device) -> None:
        self._config, self._device = config, device
        self._url = f"{config.teacher.rstrip('/')}/completions"

    def score(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the targets of each micro-batch of a batch, [N] each.

        Raises:
            TeacherFailed: the server refuses, or did not answer all requests in time; or trajectories have branches.
        """
        if batch.branches is not None:
            raise TeacherFailed(
                "trajectories of this batch have branches, which a teacher behind a URL is not asked for; name a "
                "folder as learner.algorithm.distillation.teacher"
            )
        places = np.flatnonzero(batch.seen_mask)
        wanted = [places[np.maximum(m.token, 0)] for m in micro_batches]
        needed = np.unique(np.concatenate(wanted)) if wanted else places[:0]
        logp = self._of_places(batch, needed)
        return [torch.from_numpy(logp[place]).to(self._device, torch.float32) for place in wanted]

    def save(self, path: Any) -> None:
        """Write nothing: the teacher is not in checkpoints."""

    def load(self, path: Any) -> None:
        """Read nothing."""

    def _of_places(self, batch: Batch, places: np.ndarray[Any, Any]) -> Float32s:
        """Return log-probabilities at these places of the batch's tokens, and 0 elsewhere, [ΣT]."""
        found = np.zeros(len(batch.token_ids), dtype=np.float32)
        starts = batch.starts
        owners = np.unique(np.searchsorted(starts, places, side="right") - 1)
        until = time.monotonic() + self._config.timeout_s

        def ask(owner: int) -> None:
            start, end = int(starts[owner]), int(starts[owner + 1])
            found[start:end] = self._ask([int(token) for token in batch.token_ids[start:end]], until)

        with ThreadPoolExecutor(self._config.concurrent, thread_name_prefix="teacher") as pool:
            for done in [pool.submit(ask, int(owner)) for owner in owners]:
                done.result(max(0.0, until - time.monotonic()) + self._config.timeout_s)
        return found

    def _ask(self, tokens: list[int], until: float) -> list[float]:
        """Return the log-probability of each token but the first, which has 0.

        Raises:
            TeacherFailed: there is no answer until then, or it is none.
        """
        body = {"model": self._config.model, "prompt": tokens, "max_tokens": 1, "echo": True, "logprobs": 1}
        body["temperature"] = 1.0
        key = os.environ.get(self._config.api_key_env, "")
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        if key:
            # A server that redirects elsewhere does not pass the key on.
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        wait_s, last = RETRY_S, "it did not answer"
        while (left := until - time.monotonic()) > 0:
            try:
                with urllib.request.urlopen(request, timeout=left) as reply:
                    return logps_in(reply.read(MOST_BYTES + 1), len(tokens), self._where)
            except urllib.error.HTTPError as error:
                with error:
                    said = error.read(SHOWN_CHARS).decode(errors="replace")
                last = f"HTTP status {error.code}: {said}"
                if error.code not in AGAIN:
                    raise TeacherFailed(
                        f"{self._where}: {last}; correct learner.algorithm.distillation, or the key in "
                        f"{self._config.api_key_env}"
                    ) from None
            except (OSError, http.client.HTTPException) as error:
                last = f"{type(error).__name__}: {error}"
            time.sleep(min(wait_s, max(0.0, until - time.monotonic())))
            wait_s *= 2
        raise TeacherFailed(
            f"{self._where}: no log-probabilities within learner.algorithm.distillation.timeout_s = "
            f"{self._config.timeout_s:g} s: {last}"
        )

    @property
    def _where(self) -> str:
        return f"teacher {self._config.model} at {self._config.teacher}"


def check_tokens(model: str, teacher: str) -> None:
    """Check that a teacher has the tokens of the policy: its tokenizer gives each text the same number.

    Args:
        model: name or folder of the policy's model.
        teacher: name or folder of the teacher's.

    Raises:
        ModelUnusable: a text has another number, or none; the message names it.
    """
    from transformers import AutoConfig, AutoTokenizer

    sizes = [int(AutoConfig.from_pretrained(name).get_text_config().vocab_size) for name in (model, teacher)]
    try:
        own, theirs = (AutoTokenizer.from_pretrained(name).get_vocab() for name in (model, teacher))
    except (OSError, ValueError):
        # Models of tests have no tokenizer.
        own, theirs = {}, {}
    if len(own) < sizes[0] // 2:
        # No tokenizer, or one that transformers has made of nothing.
        own = {}
    differing = next((text for text, number in own.items() if theirs.get(text) != number), None)
    if differing is not None:
        raise ModelUnusable(
            f"learner.algorithm.distillation.teacher is {teacher}, whose tokenizer gives {differing!r} the number "
            f"{theirs.get(differing)}, and that of {model} {own[differing]}; take a teacher of the same family"
        )
    if sizes[1] < max((number + 1 for number in own.values()), default=sizes[0]):
        raise ModelUnusable(
            f"learner.algorithm.distillation.teacher is {teacher} with {sizes[1]} tokens, but {model} has {sizes[0]}; "
            "take a teacher of the same family"
        )


def logps_in(answer: bytes, count: int, where: str) -> list[float]:
    """Return the log-probabilities of an answer's first tokens; 0 for the first, before which there is none.

    Args:
        answer: body of an answer of the completions interface, with ``echo``.
        count: tokens of the prompt.
        where: name of the teacher, for errors.

    Raises:
        TeacherFailed: it has no log-probability of some token.

    Example:
        >>> logps_in(b'{"choices": [{"logprobs": {"token_logprobs": [null, -0.5, -9.0]}}]}', 2, "teacher")
        [0.0, -0.5]
    """
    try:
        if len(answer) > MOST_BYTES:
            raise ValueError
        told = json.loads(answer)["choices"][0]["logprobs"]["token_logprobs"][:count]
        found = [0.0, *(float(logp) for logp in told[1:])]
        if len(told) != count or any(not math.isfinite(logp) or logp > 1e-3 for logp in found):
            raise ValueError
    except (LookupError, TypeError, ValueError, RecursionError):
        raise TeacherFailed(
            f"{where}: its answer has no log-probability of each of {count} tokens of the prompt; the server has to "
            "take token ids as a prompt, with echo and logprobs, as vLLM does"
        ) from None
    return found
