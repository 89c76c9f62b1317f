"""The learner's engine: trajectories in, updated weights out, on one process or several.

Rank 0 calls `update`, `weights`, `save`, `load`, `save_pretrained`, `release` and `close`. Every other rank
constructs the same TrainingEngine and calls `follow`, which returns when rank 0 releases or closes.
"""

import gc
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace

from learner.checkpoints import checkpoint, checkpoint_files
from learner.checkpoints.optimizer_parts import parts_to_save, restore
from learner.checkpoints.shards import ShardReader, shard_file, write_shard
from learner.config import LearnerConfig
from learner.credit.bundles import risk_advantages
from learner.gpu import take_gpu
from learner.model.lora import count_parameters, frozen_digest
from learner.model.routes import RouteReplay
from learner.publishing.weight_copy import CopyStream, OutgoingWeights, register, rounded_shapes
from learner.run_files import let_all_read
from learner.settings.advantages import RiskAdvantage
from learner.trajectory import Trajectory
from learner.update import deepspeed_zero as zero
from learner.update import gathering, ranks
from learner.update.batching.batch import Batch, make_batch
from learner.update.cpu import keep_freed_memory, use_float_attention
from learner.update.credit_assignment import TokenAdvantages, assign_credit
from learner.update.critic import load_critic
from learner.update.estimates import ValueMemory, everything, scatter_estimates
from learner.update.frozen import FrozenPolicy
from learner.update.objective.adaptive import first_state, reference_policies
from learner.update.outcome import UpdateOutcome
from learner.update.policy import load_policy
from learner.update.report import UpdateReport, make_report
from learner.update.updater import Updater

__all__ = ["TrainingEngine", "UpdateReport"]

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VALUES_FILE = "values.msgpack"
"""File in a checkpoint: values that the critic gave to windows when they were trained."""
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "vocab*", "merges.txt", "*.model",
)  # fmt: skip


def nothing_trained(started: float) -> dict[str, float]:
    """Return the metrics of an update that ended before its first step."""
    return {"learner/trained_tokens": 0.0, "learner/step_seconds": time.perf_counter() - started}


class TrainingEngine:
    """Policy, optimizer and the ranks they are spread over.

    It needs a process of its own, because it sets torch to ``config.threads_used`` threads, makes the process keep
    freed memory, and replaces the attention of models (`learner.update.cpu`).

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
        torch.manual_seed(seed)
        torch.set_num_threads(config.threads_used)
        keep_freed_memory()
        use_float_attention()
        self.config = config
        self.model = model
        take_gpu(config)
        self.rank, self.ranks = zero.join_ranks(config)
        algorithm, dtype = config.algorithm, DTYPES[config.dtype_used]
        head = algorithm.critic is not None and algorithm.critic.model == "head"
        policy = load_policy(
            model,
            dtype=dtype,
            gradient_checkpointing=config.gradient_checkpointing,
            value_head=head,
            lora=config.lora,
            shards=zero.cut_while_loading(config, self.ranks),
        )
        self.parameters = count_parameters(policy)
        """Trained and all parameters of the policy, its value head included."""
        self._base = frozen_digest(policy.lm)
        log.info("training %s; adapters: %s", self.parameters, self._lora or "none")
        self._deepspeed = zero.initialise(policy, config, self.ranks)
        policy.find_shortcuts()
        # Invariant: all ranks lay out rows in one way, because they count micro-batches together.
        policy.sharing = zero.least_over_ranks(policy.sharing, self.ranks)
        device = self._deepspeed.device
        self._copies = CopyStream(device) if device.type == "cuda" else None
        self._critic = None
        if algorithm.critic is not None and not head:
            critic = load_critic(
                model,
                dtype=dtype,
                gradient_checkpointing=config.gradient_checkpointing,
                shards=zero.cut_while_loading(config, self.ranks),
            )
            self._critic = zero.initialise(critic, config, self.ranks)
        self._updater = Updater(
            engine=self._deepspeed,
            critic=self._critic,
            frozen={
                name: FrozenPolicy(load_policy(model, dtype=dtype, lora=config.lora), device)
                for name in reference_policies(algorithm)
            },
            config=config,
            total_steps=total_steps,
            seed=seed,
            rank=self.rank,
            ranks=self.ranks,
            state=first_state(algorithm),
            sharing=policy.sharing if config.share_prefixes else 0,
            copies=self._copies,
            routes=RouteReplay(policy.lm) if algorithm.routes == "proximal" else None,
        )
        self._values = ValueMemory()
        # A window ends with its turn at the latest.
        turn = config.sampling.max_turn_tokens
        self._window_tokens = turn if segment_tokens is None else min(turn, segment_tokens)
        self.updates = 0
        """Updates run so far, over restarts, without those that ended because estimates were not finite."""
        self.optimizer_steps = 0
        """Optimizer steps applied so far, over restarts."""

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
        if self.ranks > 1:
            ranks.send(*ranks.encode_batch(ranks.RunUpdate, batch))
        outcome = self._run(batch)
        seconds = time.perf_counter() - started
        return make_report(trajectories, batch, outcome, current_version=current_version, seconds=seconds)

    def _batch(self, trajectories: Sequence[Trajectory], current_version: int) -> Batch | None:
        """Assign credit and lay out the batch. Return None if the critic's estimates are not finite."""
        algorithm = self.config.algorithm
        lay_out = partial(
            make_batch,
            trajectories,
            current_version=current_version,
            max_policy_lag=self.config.lag_bound,
            max_replay_lag=self.config.replay.max_policy_lag if self.config.replay else 0,
            imitate_from=algorithm.imitation_return if algorithm.imitation_coefficient else None,
        )
        if isinstance(algorithm.advantage, RiskAdvantage):
            state = self._updater.state
            by_risk, quantiles = risk_advantages(algorithm.advantage, trajectories, state.quantiles)
            self._updater.state = replace(state, quantiles=quantiles)
            return lay_out(TokenAdvantages.of_trajectories(by_risk, by_risk, trajectories))
        if algorithm.critic is None:
            return lay_out(assign_credit(algorithm, trajectories))
        unknown = lay_out(everything(trajectories))
        if self.ranks > 1:
            ranks.send(*ranks.encode_batch(ranks.RunEstimate, unknown))
        estimates = scatter_estimates(unknown, self._updater.estimate(unknown))
        if (
            not np.isfinite(estimates.value).all()
            or not np.isfinite(estimates.ratio_proximal_behaviour).all()
        ):
            return None
        fresh = unknown.columns["fresh"] > 0
        credit = assign_credit(algorithm, trajectories, estimates, fresh, window_tokens=self._window_tokens)
        batch = lay_out(credit)
        batch.columns["value_before"] = self._values.recall(trajectories, estimates.value)
        return batch

    def weights(self) -> OutgoingWeights:
        """Return the weights to publish.

        Names are Hugging Face's; tied tensors appear once; adapters are merged into their layers. If you take the
        tensors, take all of them before any other call to the engine.
        """
        shapes = gathering.weight_shapes(self._deepspeed)
        if self.config.publish_dtype == "bfloat16":
            shapes = rounded_shapes(shapes)
        return OutgoingWeights(shapes, self._gathered(), self._copies)

    @property
    def register(self) -> Callable[[memoryview], Callable[[], None]] | None:
        """Function that prepares memory for copies of the weights; None if the weights are on the CPU."""
        return None if self._copies is None else register

    def save(
        self, folder: Path, client_state: dict[str, Any], also: Callable[[Path], None] = lambda _: None
    ) -> None:
        """Write a checkpoint, which is valid once all of it is on disk. The last two are kept.

        Args:
            client_state: `load` returns it; JSON types only.
            also: writes more files into the checkpoint's folder.
        """

        def write(name: str) -> None:
            if self.ranks > 1:
                ranks.send(ranks.SaveCheckpoint(str(folder), name))
            self._save(folder, name, client_state)
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
        if self.ranks > 1:
            ranks.send(ranks.LoadCheckpoint(str(folder), name))
        self._values.restore((folder / name / VALUES_FILE).read_bytes())
        return self._load(folder, name)

    def save_pretrained(self, folder: Path) -> None:
        """Write the model, adapters merged, as a Hugging Face folder, with the tokenizer's files."""
        state = {name: tensor.to("cpu", copy=True) for name, tensor in self._gathered()}
        folder.mkdir(parents=True, exist_ok=True)
        # The names are those of the folder already.
        self._deepspeed.module.lm.save_pretrained(folder, state_dict=state, save_original_format=False)
        let_all_read(folder)
        source = Path(self.model)
        if not source.is_dir():
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(self.model).save_pretrained(folder)
            return
        for pattern in TOKENIZER_FILES:
            for path in source.glob(pattern):
                if path.is_file() and path.resolve() != (folder / path.name).resolve():
                    shutil.copyfile(path, folder / path.name)

    def release(self) -> None:
        """End `follow` on the other ranks and free the model. The process group stays for the next engine."""
        if self.ranks > 1:
            ranks.send(ranks.Finish(leave=False))
        self._free()

    def close(self) -> None:
        """End `follow` on the other ranks, free the model, and leave the process group.

        With several ranks, end the process by ``os._exit`` soon after, because interpreter shutdown races
        with the threads of the collectives.
        """
        if self.ranks > 1:
            ranks.send(ranks.Finish(leave=True))
        self._free()
        self._leave()

    # --- other ranks ------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Carry out the commands of rank 0 until it releases or closes the engine."""
        while True:
            command, body = ranks.receive()
            match command:
                case ranks.RunUpdate():
                    self._run(ranks.decode_batch(command, body))
                case ranks.RunEstimate():
                    self._updater.estimate(ranks.decode_batch(command, body))
                case ranks.GatherWeights():
                    for _ in gathering.gathered_weights(self._deepspeed):
                        pass
                case ranks.SaveCheckpoint(folder=folder, name=name):
                    self._save(Path(folder), name, {})
                case ranks.LoadCheckpoint(folder=folder, name=name):
                    self._load(Path(folder), name)
                case ranks.Finish(leave=leave):
                    self._free()
                    if leave:
                        self._leave()
                    return
                case _:
                    assert_never(command)

    # --- all ranks --------------------------------------------------------------------------------------

    def _free(self) -> None:
        self._deepspeed.destroy()
        if self._critic is not None:
            self._critic.destroy()
        del self._deepspeed, self._critic, self._updater
        gc.collect()

    def _leave(self) -> None:
        if self.ranks > 1:
            dist.barrier()
            dist.destroy_process_group()

    def _run(self, batch: Batch) -> UpdateOutcome:
        change = self.config.algorithm.reincarnation
        frozen = self._updater.frozen
        if change is not None and self.updates == change.step and "reference" in frozen:
            frozen["reference"].replace(gathering.trained_weights(self._deepspeed))
        before = self._snapshot() if "predecessor" in frozen else []
        outcome = self._updater.run(batch, step=self.updates, optimizer_step=self.optimizer_steps)
        if before and outcome.applied:
            frozen["predecessor"].replace(before)
        self.updates += 1
        self.optimizer_steps += outcome.applied
        return outcome

    def _snapshot(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.clone()) for name, tensor in gathering.trained_weights(self._deepspeed)]

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.ranks > 1 and self.config.zero_stage_used == 3:
            ranks.send(ranks.GatherWeights())
        yield from gathering.gathered_weights(self._deepspeed)

    def _save(self, folder: Path, name: str, client_state: dict[str, Any]) -> None:
        for kind, engine in self._engines():
            # Frozen weights are those of the model's folder: a checkpoint with adapters has only their hash.
            write_shard(shard_file(folder / name, kind, self.rank), parts_to_save(engine))
        if self.rank == 0:
            for policy, frozen in self._updater.frozen.items():
                frozen.save(folder / name / f"{policy}.safetensors")
        state = checkpoint.capture(
            ranks=self.ranks,
            dtype=self.config.dtype_used,
            lora=self._lora,
            base=self._base,
            updates=self.updates,
            optimizer_steps=self.optimizer_steps,
            adaptive=self._updater.state,
            client=client_state,
        )
        checkpoint.write_state(folder, name, self.rank, state)
        if self.ranks > 1:
            dist.barrier()

    def _load(self, folder: Path, name: str) -> dict[str, Any]:
        state = self._read_state(folder, name)
        for kind, engine in self._engines():
            restore(engine, ShardReader(folder / name, kind))
        for policy, frozen in self._updater.frozen.items():
            frozen.load(folder / name / f"{policy}.safetensors")
        checkpoint.restore_random(state)
        self.updates, self.optimizer_steps = state.updates, state.optimizer_steps
        self._updater.state = state.adaptive
        return state.client

    @property
    def _lora(self) -> str:
        """Settings of the adapters as words; "" without any."""
        return "" if self.config.lora is None else self.config.lora.words

    def _engines(self) -> list[tuple[str, Any]]:
        """Return DeepSpeed's engines, and the name of each in a checkpoint."""
        engines = [("policy", self._deepspeed)]
        if self._critic is not None:
            engines.append(("critic", self._critic))
        return engines

    def _read_state(self, folder: Path, name: str) -> checkpoint.RankState:
        return checkpoint.read_state(
            folder,
            name,
            self.rank,
            dtype=self.config.dtype_used,
            lora=self._lora,
            base=self._base,
        )
