"""The learner's engine: trajectories in, updated weights out, on one process or several.

Rank 0 calls `update`, `weights`, `save`, `load`, `save_pretrained`, `release` and `close`. Every other rank
constructs the same TrainingEngine and calls `follow`, which returns when rank 0 releases or closes.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import torch
import torch.distributed as dist

from learner import checkpoint_files
from learner.advantages import TokenAdvantages, assign_advantages, risk_advantages
from learner.formulas import hashes
from learner.run_files import ADAPTER_FOLDER
from learner.settings.advantages import RiskAdvantage
from learner.settings.learner import LearnerConfig
from learner.trajectory import RouteLayers, Trajectory
from learner.update import checkpoint, ranks
from learner.update.adaptive import AVERAGE, first_state, reference_policies
from learner.update.batch import Batch, make_batch
from learner.update.checkpoint import ShardReader, parts_to_save, restore_parts, shard_file, write_shard
from learner.update.critic import ValueMemory, everything, load_critic, scatter_estimates
from learner.update.devices import (
    forget_peak_memory,
    fuse_layers,
    keep_freed_memory,
    make_room,
    memory_metrics,
    pack_no_rows,
    take_gpu,
    use_float_attention,
)
from learner.update.lora import count_parameters, frozen_digest, save_adapter
from learner.update.policy import FrozenPolicy, PolicyModule, load_policy, save_pretrained
from learner.update.report import UpdateOutcome, UpdateReport, make_report, mean_length, token_operations
from learner.update.routed_experts import ForcedRoutes
from learner.update.siblings import AveragePolicy, solved_siblings
from learner.update.teacher import RemoteTeacher, check_tokens
from learner.update.updater import Updater
from learner.weight_copy import CopyStream, OutgoingWeights, register, rounded_shapes

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


__all__ = ["TrainingEngine", "UpdateReport"]

VALUES_FILE = "values.msgpack"
"""File in a checkpoint: values that the critic gave to windows when they were trained."""


def nothing_trained(started: float) -> dict[str, float]:
    """Return the metrics of an update that ended before its first step."""
    return {"learner/trained_tokens": 0.0, "learner/step_seconds": time.perf_counter() - started}


class TrainingEngine:
    """Policy, optimizer and the ranks they are spread over.

    It needs a process of its own, because it sets torch to ``config.threads_used`` threads, makes the process keep
    freed memory, and replaces the attention of models (`learner.update.devices`).

    Args:
        config: settings of the learner.
        model: Hugging Face name or folder.
        total_steps: learner steps of the whole run, for the learning-rate schedule.
        seed: seed of torch, and of the dealing of trajectories to mini-batches.
        segment_tokens: ``actor.segment_tokens``, the tokens of a window if the learner trains on windows;
            None: a window ends with its turn only.

    Raises:
        RuntimeError: ``config.ranks`` does not agree with how this process was started.
        ValueError: DeepSpeed would train wrongly with these settings.
        GpuUnusable: torch cannot compute on the GPU that this rank was given.
        FormulaError: a formula of the user's own cannot be loaded.
        LoraError: the adapters of ``config.lora`` cannot be put into the model.
        RoutesUnknown: the model's choice of experts is to be replayed, and cannot be.
    """

    def __init__(
        self,
        config: LearnerConfig,
        *,
        model: str,
        total_steps: int,
        seed: int,
        segment_tokens: int | None = None,
    ) -> None:
        # A formula that cannot be loaded is found before a model is.
        self._formulas = hashes(config)
        self.changed_formulas: list[str] = []
        """Sentences on formulas of the user's own that are not those of the checkpoint that was loaded."""
        torch.manual_seed(seed)
        torch.set_num_threads(config.threads_used)
        keep_freed_memory()
        use_float_attention()
        pack_no_rows()
        self.config = config
        self.model = model
        take_gpu(config)
        self.rank, self.ranks = ranks.join_ranks(config)
        self._others = ranks.OtherRanks(self.ranks - 1)
        # Invariant: all ranks load the policy, the critic and the frozen policies in this order. Loading draws from
        # torch's random state, and is a collective call at stage 3.
        policy = self._load_policy(model)
        self.parameters = count_parameters(policy)
        """Trained and all parameters of the policy, its value head included."""
        self.operations = token_operations(policy.lm)
        """Floating-point operations for a token; None if the model's configuration does not tell."""
        self._base = frozen_digest(policy.lm)
        log.info("training %s; adapters: %s", self.parameters, self._lora or "none")
        self.deepspeed = ranks.initialise(policy, config, self.ranks)
        """DeepSpeed engine of the policy."""
        fuse_layers(policy.lm, self.deepspeed.device, self._agree)
        policy.find_shortcuts()
        # Invariant: all ranks lay out rows in one way, because they count micro-batches together.
        policy.sharing = ranks.least_over_ranks(policy.sharing, self.ranks)
        device = self.deepspeed.device
        self.copies = CopyStream(device) if device.type == "cuda" else None
        """Stream of the copies of published weights; None on a CPU."""
        self.critic = self._load_critic(model)
        """DeepSpeed engine of a separate critic; None without one."""
        self.updater = self._make_updater(policy, model, total_steps=total_steps, seed=seed)
        """Trains on a batch."""
        self.updates = 0
        """Updates run so far, over restarts, without those that ended because estimates were not finite."""
        self.optimizer_steps = 0
        """Optimizer steps applied so far, over restarts."""
        self.memory: dict[str, float] = {}
        """Metrics of the GPU's memory in the last update; empty on a CPU."""
        self._values = ValueMemory()
        # A window ends with its turn at the latest.
        turn = config.sampling.max_turn_tokens
        self._window_tokens = turn if segment_tokens is None else min(turn, segment_tokens)
        make_room(self.ranks)

    def _load_policy(self, model: str) -> PolicyModule:
        config, critic = self.config, self.config.algorithm.critic
        return load_policy(
            model,
            dtype=DTYPES[config.dtype_used],
            gradient_checkpointing=config.gradient_checkpointing,
            value_head=critic is not None and critic.model == "head",
            lora=config.lora,
            shards=ranks.cut_while_loading(config, self.ranks),
        )

    def _load_critic(self, model: str) -> Any:
        config, critic = self.config, self.config.algorithm.critic
        if critic is None or critic.model == "head":
            return None
        module = load_critic(
            model,
            dtype=DTYPES[config.dtype_used],
            gradient_checkpointing=config.gradient_checkpointing,
            shards=ranks.cut_while_loading(config, self.ranks),
        )
        return ranks.initialise(module, config, self.ranks)

    def _make_updater(self, policy: PolicyModule, model: str, *, total_steps: int, seed: int) -> Updater:
        config, algorithm = self.config, self.config.algorithm
        dtype, device = DTYPES[config.dtype_used], self.deepspeed.device
        return Updater(
            engine=self.deepspeed,
            critic=self.critic,
            frozen={
                name: self._load_teacher(model)
                if name == "teacher"
                else (AveragePolicy if name == AVERAGE else FrozenPolicy)(
                    load_policy(model, dtype=dtype, lora=config.lora),
                    device,
                    given_routes=algorithm.routes == "behaviour",
                    agree=self._agree,
                )
                for name in reference_policies(algorithm)
            },
            config=config,
            total_steps=total_steps,
            seed=seed,
            rank=self.rank,
            ranks=self.ranks,
            state=first_state(algorithm),
            sharing=policy.sharing if config.share_prefixes else 0,
            copies=self.copies,
            routes=None if algorithm.routes == "current" else ForcedRoutes(policy.lm, algorithm.routes),
        )

    def _load_teacher(self, model: str) -> FrozenPolicy | RemoteTeacher:
        """Return the teacher of `learner.algorithm.distillation`.

        Raises:
            ModelUnusable: its tokens are not those of the policy.
        """
        config = self.config.algorithm.distillation
        assert config is not None
        device = self.deepspeed.device
        if config.remote:
            return RemoteTeacher(config, device)
        check_tokens(model, config.teacher)
        module = load_policy(config.teacher, dtype=DTYPES[self.config.dtype_used])
        return FrozenPolicy(module, device, agree=self._agree, fixed=True)

    @property
    def route_layers(self) -> RouteLayers | None:
        """Layers whose experts are replayed as the generators chose them; None: none are."""
        return self.updater.route_layers

    # --- rank 0 -----------------------------------------------------------------------------------------

    # --- rank 0 -----------------------------------------------------------------------------------------

    def update(self, trajectories: Sequence[Trajectory], *, current_version: int) -> UpdateReport:
        """Train on a batch of trajectories.

        Tokens that lag more than their bound behind ``current_version`` carry no gradient. If a loss or
        gradient is not finite on some rank, all ranks skip the optimizer step, and the update ends.

        Raises:
            ValueError: there are no trajectories, or a return is not finite.
            StaleTokens: tokens of a version after ``current_version``.
        """
        started = time.perf_counter()
        if not trajectories:
            raise ValueError("update needs at least one trajectory")
        batch = self._batch(trajectories, current_version)
        if batch is None:
            return UpdateReport(applied=False, nonfinite=True, metrics=nothing_trained(started))
        self._others.send_update(batch)
        outcome = self._train_batch(batch)
        seconds = time.perf_counter() - started
        report = make_report(trajectories, batch, outcome, current_version=current_version, seconds=seconds)
        report.metrics.update(self._device_metrics(trajectories, outcome.filled, seconds))
        return report

    def mean_logp(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return the mean log-probability of each trajectory's action tokens under the present weights, in nats.

        All ranks take part; call it on rank 0.
        """
        batch = make_batch(
            trajectories, everything(trajectories), current_version=0, max_policy_lag=0, with_routes=False
        )
        self._others.send_estimate(batch)
        logp = np.zeros(len(batch.token_ids))
        logp[batch.seen_mask] = self.updater.estimate(batch)["logp_current"]
        means = np.add.reduceat(logp, batch.starts[:-1]) / np.maximum(1, batch.count(batch.seen_mask))
        return [float(mean) for mean in means]

    def _device_metrics(
        self, trajectories: Sequence[Trajectory], computed: int, seconds: float
    ) -> dict[str, float]:
        """Return the metrics of an update's devices.

        Args:
            computed: tokens that all ranks have computed, without padding.
        """
        metrics = dict(self.memory)
        if (operations := self.operations) is not None:
            work = operations.for_tokens(computed, mean_length([len(t.token_ids) for t in trajectories]))
            metrics["learner/tflops_per_rank"] = work / seconds / self.ranks / 1e12
        return metrics

    def _batch(self, trajectories: Sequence[Trajectory], current_version: int) -> Batch | None:
        """Assign advantages and lay out the batch. Return None if the critic's estimates are not finite."""
        algorithm = self.config.algorithm
        lay_out = partial(
            make_batch,
            trajectories,
            current_version=current_version,
            max_policy_lag=self.config.lag_bound,
            max_replay_lag=self.config.replay.max_policy_lag if self.config.replay else 0,
            imitate_from=algorithm.imitation_return if algorithm.imitation_coefficient else None,
            with_routes=algorithm.routes == "behaviour",
            by_origin=algorithm.by_origin,
        )
        if algorithm.siblings is not None:
            lay_out = partial(lay_out, siblings=solved_siblings(trajectories))
        if algorithm.critic is None:
            # Invariant: what was given stands behind what the policy wrote, and is compared with nothing.
            own = [t for t in trajectories if t.origin != "given"]
            given_tokens = sum(len(t) for t in trajectories[len(own) :])
            return lay_out(self._advantages(own, current_version).with_none_behind(given_tokens))
        unknown = lay_out(everything(trajectories))
        self._others.send_estimate(unknown)
        estimates = scatter_estimates(unknown, self.updater.estimate(unknown))
        if (
            not np.isfinite(estimates.value).all()
            or not np.isfinite(estimates.ratio_proximal_behaviour).all()
        ):
            return None
        fresh = unknown.columns["fresh"] > 0
        advantages = assign_advantages(
            algorithm, trajectories, estimates, fresh, window_tokens=self._window_tokens
        )
        batch = lay_out(advantages)
        batch.columns["value_before"] = self._values.recall(trajectories, estimates.value)
        return batch

    def _advantages(self, own: Sequence[Trajectory], current_version: int) -> TokenAdvantages:
        """Compute advantages without a critic, of trajectories that the policy wrote."""
        algorithm = self.config.algorithm
        if not own:
            return TokenAdvantages.of_tokens(np.zeros(0), np.zeros(0))
        if isinstance(algorithm.advantage, RiskAdvantage):
            known = self.updater.state.quantiles
            by_risk, quantiles = risk_advantages(algorithm.advantage, own, known)
            self.updater.remember_quantiles(quantiles)
            return TokenAdvantages.of_trajectories(by_risk, by_risk, own)
        return assign_advantages(algorithm, own, current_version=current_version)

    def weights(self) -> OutgoingWeights:
        """Return the weights to publish.

        Names are Hugging Face's; tied tensors appear once; adapters are merged into their layers, or are all that there
        is (`learner.lora.publish`). If you take the tensors, take all of them before any other call to the engine.
        """
        lora = self.config.lora
        alone = lora is not None and lora.publish == "adapter"
        shapes = ranks.adapter_weight_shapes(self.deepspeed) if alone else self.shapes
        if self.config.publish_dtype == "bfloat16":
            shapes = rounded_shapes(shapes)
        tensors = self._gathered_adapters(scaled=True) if alone else self._gathered()
        return OutgoingWeights(shapes, tensors, self.copies)

    @property
    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of the tensors of the whole model, under the names of its folder."""
        return ranks.weight_shapes(self.deepspeed)

    @property
    def register(self) -> Callable[[memoryview], Callable[[], None]] | None:
        """Function that prepares memory for copies of the weights; None if the weights are on the CPU."""
        return None if self.copies is None else register

    def save(
        self, folder: Path, client_state: dict[str, Any], also: Callable[[Path], None] = lambda _: None
    ) -> None:
        """Write a checkpoint, which is valid once all of it is on disk. The last two are kept.

        Args:
            client_state: `load` returns it; JSON types only.
            also: writes more files into the checkpoint's folder.
        """

        def write(name: str) -> None:
            self._others.send_save(folder, name)
            self._save_share(folder, name, client_state)
            (folder / name / VALUES_FILE).write_bytes(self._values.encode())
            also(folder / name)

        checkpoint_files.write_whole(folder, self.optimizer_steps, write)

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from the newest checkpoint, and return the ``client_state`` that `save` was given.

        The number of ranks and the ZeRO stage may differ from those with which it was written.

        Raises:
            CheckpointError: there is none, or it was written with a different dtype, adapters, or weights below the
                adapters, or for a different model.
        """
        name = checkpoint_files.latest_name(folder)
        # Reject a bad checkpoint before the other ranks get the command.
        self._read_state(folder, name)
        self._others.send_load(folder, name)
        self._values.restore((folder / name / VALUES_FILE).read_bytes())
        return self._load_share(folder, name)

    def save_pretrained(self, folder: Path) -> None:
        """Write the model, adapters merged, as a Hugging Face folder, with the tokenizer's files.

        Adapters are written beside it, too, in a folder of their own for PEFT.
        """
        save_pretrained(self.deepspeed.module.lm, self._gathered(), folder, source=self.model)
        if self.config.lora is not None:
            factors = self._gathered_adapters(scaled=False)
            save_adapter(
                self.deepspeed.module.lm, factors, folder / ADAPTER_FOLDER, self.config.lora, self.model
            )

    def release(self) -> None:
        """End `follow` on the other ranks and free the model. The process group stays for the next engine."""
        self._others.send_finish(leave=False)
        self._free()

    def close(self) -> None:
        """End `follow` on the other ranks, free the model, and leave the process group.

        With several ranks, end the process by ``os._exit`` soon after, because interpreter shutdown races
        with the threads of the collectives.
        """
        self._others.send_finish(leave=True)
        self._free()
        self._leave()

    def _gathered_adapters(self, *, scaled: bool) -> Iterator[tuple[str, torch.Tensor]]:
        if self.config.zero_stage_used == 3:
            self._others.send_gather(adapters=True)
        yield from ranks.gathered_adapters(self.deepspeed, scaled=scaled)

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.config.zero_stage_used == 3:
            self._others.send_gather()
        yield from ranks.gathered_weights(self.deepspeed)

    # --- other ranks ------------------------------------------------------------------------------------

    # --- every rank: collective calls -------------------------------------------------------------------

    def follow(self) -> None:
        """Carry out the commands of rank 0 until it releases or closes the engine."""
        while True:
            command, body = ranks.receive()
            match command:
                case ranks.RunUpdate():
                    self._train_batch(ranks.decode_batch(command, body))
                case ranks.RunEstimate():
                    self.updater.estimate(ranks.decode_batch(command, body))
                case ranks.GatherWeights(adapters=alone):
                    gathered = ranks.gathered_adapters(self.deepspeed, scaled=False) if alone else None
                    for _ in gathered or ranks.gathered_weights(self.deepspeed):
                        pass
                case ranks.SaveCheckpoint(folder=folder, name=name):
                    self._save_share(Path(folder), name, {})
                case ranks.LoadCheckpoint(folder=folder, name=name):
                    self._load_share(Path(folder), name)
                case ranks.Finish(leave=leave):
                    self._free()
                    if leave:
                        self._leave()
                    return
                case _:
                    assert_never(command)

    def _train_batch(self, batch: Batch) -> UpdateOutcome:
        """Train on a batch. This is a collective call."""
        forget_peak_memory()
        outcome = self.updater.run(batch, step=self.updates, optimizer_step=self.optimizer_steps)
        self.updates += 1
        self.optimizer_steps += outcome.applied
        self.memory = memory_metrics()
        make_room(self.ranks)
        return outcome

    def _save_share(self, folder: Path, name: str, client_state: dict[str, Any]) -> None:
        """Write this rank's share of a checkpoint. This is a collective call.

        Args:
            name: name of the new checkpoint in the folder of all.
            client_state: what rank 0 keeps in it; JSON types only.
        """
        for kind, engine in self._engines():
            # Frozen weights are those of the model's folder: a checkpoint with adapters has only their hash.
            write_shard(shard_file(folder / name, kind, self.rank), parts_to_save(engine))
        if self.rank == 0:
            for policy, frozen in self.updater.frozen.items():
                frozen.save(folder / name / f"{policy}.safetensors")
        state = checkpoint.capture(
            ranks=self.ranks,
            dtype=self.config.dtype_used,
            lora=self._lora,
            base=self._base,
            updates=self.updates,
            optimizer_steps=self.optimizer_steps,
            adaptive=self.updater.state,
            formulas=self._formulas,
            client=client_state,
        )
        checkpoint.write_state(folder, name, self.rank, state)
        if self.ranks > 1:
            dist.barrier()

    def _load_share(self, folder: Path, name: str) -> dict[str, Any]:
        """Continue from a checkpoint, and return the ``client_state`` in it. This is a collective call.

        Raises:
            CheckpointError: see `TrainingEngine.load`.
        """
        state = self._read_state(folder, name)
        for kind, engine in self._engines():
            restore_parts(engine, ShardReader(folder / name, kind))
        for policy, frozen in self.updater.frozen.items():
            frozen.load(folder / name / f"{policy}.safetensors")
        checkpoint.restore_random(state)
        self.updates, self.optimizer_steps = state.updates, state.optimizer_steps
        self.updater.restore(state.adaptive)
        self.changed_formulas = checkpoint.changed_formulas(state.formulas, self._formulas)
        for text in self.changed_formulas:
            log.warning("%s", text)
        return state.client

    def _read_state(self, folder: Path, name: str) -> checkpoint.RankState:
        """Read this rank's state in a checkpoint, and compare it with these settings.

        Raises:
            CheckpointError: see `TrainingEngine.load`.
        """
        return checkpoint.read_state(
            folder,
            name,
            self.rank,
            dtype=self.config.dtype_used,
            lora=self._lora,
            base=self._base,
        )

    @property
    def _lora(self) -> str:
        """Settings of the adapters as words; "" without any."""
        return "" if self.config.lora is None else self.config.lora.words

    def _engines(self) -> list[tuple[str, Any]]:
        """Return DeepSpeed's engines, and the name of each in a checkpoint."""
        engines = [("policy", self.deepspeed)]
        if self.critic is not None:
            engines.append(("critic", self.critic))
        return engines

    def _agree(self, mine: bool) -> bool:
        """Return whether all ranks say true. This is a collective call."""
        return bool(ranks.least_over_ranks(int(mine), self.ranks))

    def _free(self) -> None:
        """Free the models."""
        self.deepspeed.destroy()
        if self.critic is not None:
            self.critic.destroy()
        del self.deepspeed, self.critic, self.updater
        gc.collect()

    def _leave(self) -> None:
        """Leave the process group. This is a collective call."""
        if self.ranks > 1:
            dist.barrier()
            dist.destroy_process_group()
