"""Contradictions between what generators do and what the learner and the run want of them, each with the cure."""

from collections.abc import Iterator

from launch.run_file.sections import RunConfig


def routes_untold(config: RunConfig) -> Iterator[str]:
    """Yield why no generator would tell the experts that the learner is to replay."""
    if config.learner.algorithm.routes != "behaviour":
        return
    if config.generator.backend == "http":
        yield (
            'learner.algorithm.routes is "behaviour" but generator.backend is "http", which does not tell the experts '
            'of its tokens; set backend to "vllm", or routes to "proximal"'
        )
    elif not config.generator.routes:
        yield (
            'learner.algorithm.routes is "behaviour" but generator.routes is false, so no generator would record the '
            "experts; leave generator.routes out"
        )


def sleep_impossible(config: RunConfig) -> Iterator[str]:
    """Yield why no engine could sleep while the learner updates, although the run file says so."""
    if config.generator.sleep_in_updates is not True:
        return
    why = ""
    if config.run.mode != "sync":
        why = 'run.mode is "async", where generators sample while the learner updates'
    elif config.generator.backend == "http":
        why = 'generator.backend is "http", a server that this run does not own'
    elif config.learner.nodes > 1:
        why = "learner.nodes is above 1, and the lock on shared GPUs is of one host"
    if why:
        yield f"generator.sleep_in_updates is true but {why}; leave it out"
