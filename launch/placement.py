"""Places each process of a run on its GPUs. Pure, but for `visible_gpus`."""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from launch.errors import ConfigError
from launch.run_file.sections import RunConfig

VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that shows a process its GPUs; the process counts them from 0."""
LEARNER, JUDGE = "learner", "judge"
GENERATOR = "generator-"
"""Beginning of the names of generators."""


@dataclass(frozen=True)
class Placement:
    """GPUs of the processes that compute. Without GPUs both are empty."""

    posts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Places in the list of visible GPUs, by the name of the process."""
    remarks: tuple[str, ...] = ()

    def environment(self, post: str, gpus: Sequence[str]) -> dict[str, str]:
        """Return the environment variable of a process; empty if it has no GPUs of its own.

        Args:
            gpus: names of the visible GPUs, as from `visible_gpus`.
        """
        if post not in self.posts:
            return {}
        return {VARIABLE: ",".join(gpus[place] for place in self.posts[post])}

    def start_after(self, post: str) -> tuple[str, ...]:
        """Return the processes that have to join before this one starts, because they share a GPU.

        An engine measures the free memory of its GPU while it starts, so nobody else may take or free any. So the
        generators start one after the other, the learner follows, and the judge, which nobody sees joining, is last.

        Example:
            >>> one = Placement({"learner": (0,), "generator-0": (0,), "generator-1": (1,)})
            >>> one.start_after("learner"), one.start_after("generator-0"), one.start_after("actor-0")
            (('generator-0',), (), ())
        """
        turns = [name for name in self.posts if name not in (LEARNER, JUDGE)] + [LEARNER, JUDGE]
        own = set(self.posts.get(post, ()))
        earlier = turns[: turns.index(post)] if post in turns else []
        return tuple(name for name in earlier if own & set(self.posts.get(name, ())))

    def sleepers(self, config: RunConfig) -> tuple[str, ...]:
        """Return the generators that sleep while the learner updates; without GPUs all, if the run file says so.

        Args:
            config: with "auto" decided, see `launch.preflight.hardware`.
        """
        if config.generator.sleep_in_updates is not True:
            return ()
        if not self.posts:
            return tuple(f"{GENERATOR}{number}" for number in range(config.generator.count))
        return tuple(post for post in self.start_after(LEARNER) if post.startswith(GENERATOR))

    def by_gpu(self) -> dict[int, list[str]]:
        """Return the processes on each GPU that is used.

        Example:
            >>> Placement({"learner": (0, 1), "generator-0": (1,)}).by_gpu()
            {0: ['learner'], 1: ['learner', 'generator-0']}
        """
        used: dict[int, list[str]] = {}
        for post, places in self.posts.items():
            for place in places:
                used.setdefault(place, []).append(post)
        return dict(sorted(used.items()))

    def sentence(self) -> str:
        """Return the layout in words; "" without GPUs.

        Example:
            >>> Placement({"learner": (0, 1), "generator-0": (2,)}).sentence()
            'GPUs: learner 0 and 1, generator-0 2'
        """
        each = [f"{post} {' and '.join(map(str, places))}" for post, places in self.posts.items()]
        return f"GPUs: {', '.join(each)}" if each else ""


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` takes them.

    A torch that was built for the CPU uses none; `unused_gpus` says so.
    """
    return _named_gpus() if torch_uses_gpus() else []


def unused_gpus() -> Iterator[str]:
    """Yield a remark if this host has GPUs, but the installed torch was built for the CPU."""
    if not torch_uses_gpus() and (gpus := _named_gpus()):
        yield (
            f"this host shows {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}, but the installed torch was built for the "
            'CPU, so everything computes on the CPU; to use them, install offbeat with the extra "gpu" into a new '
            "virtual environment: pip would keep the torch and the vLLM that are installed here"
        )


def _named_gpus() -> list[str]:
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # CUDA reads the list up to the first name that is none.
        ends = (i for i, name in enumerate(names) if name in ("", "-1"))
        return names[: next(ends, len(names))]
    # A container has device files of its own GPUs only, and CUDA counts those from 0.
    there = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))
    return [str(number) for number in range(there)]


def torch_uses_gpus() -> bool:
    """Return whether the installed torch may use GPUs; also True without torch. Imports nothing."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return True
    version = Path(found.origin).with_name("version.py")
    if not version.is_file():
        return True
    built_for = dict(re.findall(r"^(cuda|hip)\b.*= (.*)$", version.read_text(), re.MULTILINE))
    return not built_for or any(value != "None" for value in built_for.values())


def placement(config: RunConfig, gpus: int, host: str = "") -> Placement:
    """Return the GPUs of the learner, the generators and the judge.

    The ranks of the learner come first, one GPU each. Each generator gets as many as
    `generator.tensor_parallel_size` from the others. Processes share a GPU only if there are too few.

    Args:
        gpus: number of visible GPUs.
        host: name of a further host, which has no learner; "": the host of the learner.

    Raises:
        ConfigError: this layout is impossible; the message has the cure.
    """
    if not gpus:
        for setting, devices in _settings(config):
            if devices:
                why = "".join(f"; {remark}" for remark in unused_gpus())
                raise ConfigError(
                    f"{setting} is {list(devices)}, but this host shows no GPU{why or '; leave it out'}"
                )
        return Placement()
    learner = () if host else _of_learner(config, gpus)
    posts = {} if host else {LEARNER: learner}
    posts |= _of_generators(config, gpus, learner, host)
    if config.judge is not None:
        posts[JUDGE] = (_freest(gpus, posts.values()),)
    return Placement(posts, tuple(_remarks(config, gpus, posts)))


def _settings(config: RunConfig) -> list[tuple[str, tuple[int, ...]]]:
    return [("learner.devices", config.learner.devices), ("generator.devices", config.generator.devices)]


def _of_learner(config: RunConfig, gpus: int) -> tuple[int, ...]:
    """Return one GPU for each rank."""
    ranks, chosen = config.learner.processes, _chosen("learner.devices", config.learner.devices, gpus)
    if chosen and len(chosen) != ranks:
        raise ConfigError(
            f"learner.devices names {len(chosen)} GPUs, but learner.processes is {ranks}; each rank takes one, so make "
            "them equal"
        )
    if ranks > gpus:
        raise ConfigError(
            f"learner.processes is {ranks}, but there are {gpus} GPUs, and ranks cannot share one; lower it to at most "
            f"{gpus}"
        )
    free = [place for place in range(gpus) if place not in config.generator.devices]
    return chosen or tuple((free if len(free) >= ranks else list(range(gpus)))[:ranks])


def peer_name(role: str, number: int, host: str = "") -> str:
    """Return the name of a generator or an actor.

    Args:
        host: name of its host, if that is a further one; "": it is supervised beside the learner.

    Example:
        >>> peer_name("actor", 0), peer_name("generator", 1, "gpu7")
        ('actor-0', 'generator-gpu7-1')
    """
    return f"{role}-{host}-{number}" if host else f"{role}-{number}"


def _of_generators(
    config: RunConfig, gpus: int, learner: Sequence[int], host: str
) -> dict[str, tuple[int, ...]]:
    own = config.generator
    if own.backend != "vllm" or not own.count:
        return {}
    size, chosen = own.tensor_parallel_size, _chosen("generator.devices", own.devices, gpus)
    if size > (there := len(chosen) or gpus):
        where = "generator.devices names" if chosen else "there are"
        raise ConfigError(
            f"generator.tensor_parallel_size is {size}, but {where} {there} GPUs; lower it to {there}"
        )
    rest = [place for place in range(gpus) if place not in learner]
    pool = chosen or (rest if len(rest) >= size else range(gpus))
    blocks = [tuple(pool[at : at + size]) for at in range(0, len(pool) - size + 1, size)]
    return {peer_name("generator", i, host): blocks[i % len(blocks)] for i in range(own.count)}


def _chosen(setting: str, devices: tuple[int, ...], gpus: int) -> tuple[int, ...]:
    if wrong := [place for place in devices if place >= gpus]:
        raise ConfigError(
            f"{setting} names GPU {wrong[0]}, but there are {gpus}, counted from 0 in {VARIABLE} or on this host"
        )
    if len(set(devices)) < len(devices):
        raise ConfigError(f"{setting} is {list(devices)}: it names a GPU twice")
    return devices


def _freest(gpus: int, used: Collection[tuple[int, ...]]) -> int:
    """Return the GPU with the fewest processes, the last of equals."""
    counts = [sum(place in places for places in used) for place in range(gpus)]
    return max(range(gpus), key=lambda place: (-counts[place], place))


def _remarks(config: RunConfig, gpus: int, posts: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield what a person should know of shared and idle GPUs.

    Raises:
        ConfigError: engines want more memory of one GPU than there is.
    """
    share = config.generator.gpu_memory_utilization
    for place in range(gpus):
        here = [post for post, places in posts.items() if place in places]
        engines = [post for post in here if post != LEARNER]
        if not isinstance(share, str) and len(engines) * share > 1.0:
            raise ConfigError(
                f"GPU {place} is shared by {', '.join(engines)}, each with generator.gpu_memory_utilization = "
                f"{share:g} of its memory; lower it to at most {1 / len(engines):.2f}, or lower generator.count"
            )
        if len(here) > 1:
            yield f"GPU {place} is shared by {' and '.join(here)}"
    if idle := [place for place in range(gpus) if not any(place in places for places in posts.values())]:
        named = ", ".join(map(str, idle))
        yield f"GPU {named} of {gpus} would be idle; raise generator.count or learner.processes to use all"
