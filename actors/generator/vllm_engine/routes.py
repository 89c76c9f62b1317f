"""Experts of a mixture of experts that vLLM chooses for each token: how vLLM records them, and how they are read.

vLLM hands them out for its newer model runner alone, which needs a GPU. The runner of the CPU engine has all parts but
the three calls that `record_on_cpu` adds.
"""

from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np

from actors.sampled import Routes
from protocol.arrays import Experts


@dataclass(frozen=True)
class _Step:
    """The rows of one step, as vLLM's connector reads them from its newer runner's batch."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray[Any, Any]
    num_computed_tokens_np: np.ndarray[Any, Any]


def allow_on_cpu() -> None:
    """Let vLLM take `enable_return_routed_experts` on a CPU. All processes of an engine must call it."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        VllmConfig._verify_aux_output_compatibility = lambda self: None


def record_on_cpu() -> None:
    """Let vLLM's runner on a CPU record experts, if the engine is asked to. Call it in the engine's process."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    allow_on_cpu()
    begin, run, sample = Runner.initialize_kv_cache, Runner.execute_model, Runner.sample_tokens

    @wraps(begin)
    def with_connector(self: Any, config: Any, is_profiling: bool = False, **named: Any) -> None:
        begin(self, config, is_profiling, **named)
        self.routes = None if is_profiling else _Recorder.of(self, config)

    @wraps(run)
    def noting_step(self: Any, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        if self.routes is not None:
            self.routes.begin(scheduled)
        output = run(self, scheduled, *arguments, **named)
        if self.routes is not None and self.execute_model_state is not None:
            self.routes.note(self)
        return output

    @wraps(sample)
    def with_routes(self: Any, *arguments: Any, **named: Any) -> Any:
        output = sample(self, *arguments, **named)
        if self.routes is not None:
            self.routes.add_to(output)
        return output

    Runner.initialize_kv_cache, Runner.execute_model, Runner.sample_tokens = (
        with_connector,
        noting_step,
        with_routes,
    )


class _Recorder:
    """Calls vLLM's connector for experts at each step, as the newer runner does."""

    def __init__(self, connector: Any) -> None:
        self._connector, self._step = connector, None

    @classmethod
    def of(cls, runner: Any, config: Any) -> "_Recorder | None":
        """Return the recorder of a runner with this KV cache; None if nobody wants experts."""
        from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

        if not runner.vllm_config.aux_output_config.enabled:
            return None
        return cls(get_aux_output_connector(runner.model, runner.vllm_config, config))

    def begin(self, scheduled: Any) -> None:
        self._connector.begin_step(scheduled.aux_output_connector_metadata)

    def note(self, runner: Any) -> None:
        """Keep the experts of the step that was just computed."""
        batch, count = runner.input_batch, runner.input_batch.num_reqs
        step = _Step(
            list(batch.req_ids),
            runner.query_start_loc.np[: count + 1].copy(),
            batch.num_computed_tokens_cpu[:count].copy(),
        )
        self._step = self._connector.prepare_output(step)

    def add_to(self, output: Any) -> None:
        """Add the rows of the step to its output."""
        step, self._step = self._step, None
        if step is not None:
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            step.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = step.process_output()


class RouteReader:
    """Rows of one request, in the order in which vLLM returns them: without gaps from the first token asked for.

    It looks at each row once, because the event loop of all requests waits for it.

    Args:
        first: position of that token in the prompt.
        prompt: tokens of the prompt.
    """

    def __init__(self, first: int, prompt: int) -> None:
        self._next, self._prompt = first, prompt
        self._arrays = self._rows = 0
        """Arrays and rows that vLLM has returned so far."""
        self._waiting: list[np.ndarray[Any, Any]] = []
        """Rows that are not handed out yet."""

    def add(self, arrays: list[np.ndarray[Any, Any]]) -> None:
        """Note all arrays that vLLM has returned for the request so far, [n, layers, experts] each."""
        new, self._arrays = arrays[self._arrays :], len(arrays)
        self._add_rows(new)

    def add_last(self, rows: np.ndarray[Any, Any]) -> None:
        """Note all rows of the request as one array, as vLLM returns them with its last output."""
        self._add_rows([rows[self._rows :]])

    def _add_rows(self, new: list[np.ndarray[Any, Any]]) -> None:
        self._waiting += [rows for rows in new if len(rows)]
        self._rows += sum(map(len, new))

    def take_new_rows(self, tokens: int) -> Routes | None:
        """Return the new rows of experts for tokens that the actor has, or None.

        Args:
            tokens: sampled tokens that the actor has, those of this chunk included.
        """
        # With `stream_interval`, vLLM may be ahead of the tokens that it hands out.
        count = self._prompt + tokens - self._next
        if not self._waiting or count <= 0:
            return None
        rows = np.concatenate(self._waiting)
        self._waiting = [rows[count:]] if count < len(rows) else []
        rows = rows[:count]
        first, self._next = self._next, self._next + len(rows)
        positions = np.arange(first, self._next, dtype=np.int32)
        # vLLM writes uint16 where a layer has more than 256 experts; no layer has 2^15.
        flat = rows.reshape(len(rows), -1)
        experts: Experts = flat if flat.dtype == np.uint8 else flat.astype(np.int16)
        return Routes(positions, experts)
