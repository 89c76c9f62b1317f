"""The engine of one rank: the models, and what every rank does with them when rank 0 says so."""

import gc
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from learner.checkpoints import checkpoint
from learner.checkpoints.optimizer_parts import parts_to_save, restore
from learner.checkpoints.shards import ShardReader, shard_file, write_shard
from learner.config import LearnerConfig
from learner.gpu import forget_peak_memory, make_room, memory_metrics, take_gpu
from learner.model.lora import count_parameters, frozen_digest
from learner.model.operations import token_operations
from learner.model.routes import RouteReplay
from learner.publishing.weight_copy import CopyStream
from learner.update import deepspeed_zero as zero
from learner.update import gathering
from learner.update.batching.batch import Batch
from learner.update.critic import load_critic
from learner.update.device.cpu import keep_freed_memory, use_float_attention
from learner.update.device.fused_layers import fuse_layers
from learner.update.device.gpu_queue import pack_no_rows
from learner.update.frozen import FrozenPolicy
from learner.update.objective.adaptive import first_state, reference_policies
from learner.update.outcome import UpdateOutcome
from learner.update.policy import PolicyModule, load_policy
from learner.update.updater import Updater

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RankEngine:
    """Models of one rank, or its share of them, and their optimizers.

    Every rank makes the same calls in the same order, because most of them are collective. What differs between rank
    0 and the others is in `TrainingEngine`, which also describes the arguments and the errors.
    """

    def __init__(self, config: LearnerConfig, *, model: str, total_steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(config.threads_used)
        keep_freed_memory()
        use_float_attention()
        pack_no_rows()
        self.config = config
        take_gpu(config)
        self.rank, self.ranks = zero.join_ranks(config)
        # Invariant: all ranks load the policy, the critic and the frozen policies in this order. Loading draws from
        # torch's random state, and is a collective call at stage 3.
        policy = self._load_policy(model)
        self.parameters = count_parameters(policy)
        """Trained and all parameters of the policy, its value head included."""
        self.operations = token_operations(policy.lm)
        """Floating-point operations for a token; None if the model's configuration does not tell."""
        self._base = frozen_digest(policy.lm)
        log.info("training %s; adapters: %s", self.parameters, self._lora or "none")
        self.deepspeed = zero.initialise(policy, config, self.ranks)
        """DeepSpeed engine of the policy."""
        fuse_layers(policy.lm, self.deepspeed.device, self._agree)
        policy.find_shortcuts()
        # Invariant: all ranks lay out rows in one way, because they count micro-batches together.
        policy.sharing = zero.least_over_ranks(policy.sharing, self.ranks)
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
        make_room(self.ranks)

    def _load_policy(self, model: str) -> PolicyModule:
        config, critic = self.config, self.config.algorithm.critic
        return load_policy(
            model,
            dtype=DTYPES[config.dtype_used],
            gradient_checkpointing=config.gradient_checkpointing,
            value_head=critic is not None and critic.model == "head",
            lora=config.lora,
            shards=zero.cut_while_loading(config, self.ranks),
        )

    def _load_critic(self, model: str) -> Any:
        config, critic = self.config, self.config.algorithm.critic
        if critic is None or critic.model == "head":
            return None
        module = load_critic(
            model,
            dtype=DTYPES[config.dtype_used],
            gradient_checkpointing=config.gradient_checkpointing,
            shards=zero.cut_while_loading(config, self.ranks),
        )
        return zero.initialise(module, config, self.ranks)

    def _make_updater(self, policy: PolicyModule, model: str, *, total_steps: int, seed: int) -> Updater:
        config, algorithm = self.config, self.config.algorithm
        dtype, device = DTYPES[config.dtype_used], self.deepspeed.device
        return Updater(
            engine=self.deepspeed,
            critic=self.critic,
            frozen={
                name: FrozenPolicy(
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
            routes=None if algorithm.routes == "current" else RouteReplay(policy.lm, algorithm.routes),
        )

    def _agree(self, mine: bool) -> bool:
        """Return whether all ranks say true. This is a collective call."""
        return bool(zero.least_over_ranks(int(mine), self.ranks))

    def free(self) -> None:
        """Free the models."""
        self.deepspeed.destroy()
        if self.critic is not None:
            self.critic.destroy()
        del self.deepspeed, self.critic, self.updater
        gc.collect()

    def leave(self) -> None:
        """Leave the process group. This is a collective call."""
        if self.ranks > 1:
            dist.barrier()
            dist.destroy_process_group()

    def run(self, batch: Batch) -> UpdateOutcome:
        """Train on a batch. This is a collective call."""
        change = self.config.algorithm.reincarnation
        frozen = self.updater.frozen
        if change is not None and self.updates == change.step and "reference" in frozen:
            frozen["reference"].replace(gathering.trained_weights(self.deepspeed))
        before = self._snapshot() if "predecessor" in frozen else []
        forget_peak_memory()
        outcome = self.updater.run(batch, step=self.updates, optimizer_step=self.optimizer_steps)
        if before and outcome.applied:
            frozen["predecessor"].replace(before)
        self.updates += 1
        self.optimizer_steps += outcome.applied
        self.memory = memory_metrics()
        make_room(self.ranks)
        return outcome

    def _snapshot(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.clone()) for name, tensor in gathering.trained_weights(self.deepspeed)]

    def save(self, folder: Path, name: str, client_state: dict[str, Any]) -> None:
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
            client=client_state,
        )
        checkpoint.write_state(folder, name, self.rank, state)
        if self.ranks > 1:
            dist.barrier()

    def load(self, folder: Path, name: str) -> dict[str, Any]:
        """Continue from a checkpoint, and return the ``client_state`` in it. This is a collective call.

        Raises:
            CheckpointError: see `TrainingEngine.load`.
        """
        state = self.read_state(folder, name)
        for kind, engine in self._engines():
            restore(engine, ShardReader(folder / name, kind))
        for policy, frozen in self.updater.frozen.items():
            frozen.load(folder / name / f"{policy}.safetensors")
        checkpoint.restore_random(state)
        self.updates, self.optimizer_steps = state.updates, state.optimizer_steps
        self.updater.state = state.adaptive
        return state.client

    def read_state(self, folder: Path, name: str) -> checkpoint.RankState:
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
