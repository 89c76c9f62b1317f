"""Compares what a run file asks for with what the environment says of itself: tasks, rewards, marks, ports. Pure."""

from collections.abc import Collection, Iterator

from envs.base import SuiteFacts
from envs.user_code import nearest
from launch.run_file.sections import RunConfig
from learner.rewards import needed_marks, needed_rewards


def fitted(config: RunConfig, facts: SuiteFacts) -> tuple[RunConfig, list[str]]:
    """Return the configuration with at most as many evaluation tasks as held-out tasks, and a remark on that."""
    there, wanted = facts.heldout_tasks, config.learner.evaluation_tasks
    if there is None or wanted <= there:
        return config, []
    learner = config.learner.model_copy(update={"evaluation_tasks": there})
    remark = f"learner.evaluation_tasks is {wanted}, but there are {there} held-out tasks: evaluations have {there}"
    return config.model_copy(update={"learner": learner}), [remark]


def sets_without_tasks(config: RunConfig, facts: SuiteFacts) -> Iterator[str]:
    """Yield the refusal of a named evaluation set that asks for more held-out tasks than there are."""
    for name, of in config.learner.evaluation.items():
        there = facts.heldout_by_env.get(of.env) if of.env else facts.heldout_tasks
        if there is not None and of.first_task + of.tasks > there:
            yield (
                f"learner.evaluation.{name} has the tasks {of.first_task} to {of.first_task + of.tasks - 1}, but there "
                f"are {there} held-out tasks; lower its tasks or first_task"
            )


def shared_ports(config: RunConfig, facts: SuiteFacts) -> Iterator[str]:
    """Yield the refusal of each port on which several actors, or several environments of one, would listen."""
    for port in sorted(set(facts.fixed_ports)):
        if config.actor.count > 1:
            yield (
                f"actor.count is {config.actor.count}, and each actor would listen on port {port} of this host, which "
                "only one process can; give port 0 in env.params.listen, so that each takes a free one, or set "
                "actor.count = 1"
            )
        elif facts.fixed_ports.count(port) > 1:
            yield (
                f"several [[env]] tables listen on port {port}; give each a port of its own, or port 0, in its "
                "params.listen"
            )


def unknown_rewards(config: RunConfig, facts: SuiteFacts) -> Iterator[str]:
    """Yield the refusal of each named reward that the environment does not have."""
    if (names := facts.reward_names) is None:
        return
    for field, name in needed_rewards(config.learner):
        if name not in names:
            what = "" if field.endswith(f".{name}") else f' is "{name}"'
            yield (
                f"{field}{what}: the environment has no reward of this name"
                f"{nearest(name, list(names))} (rewards: {', '.join(names)})"
            )


def rewards_not_seen(config: RunConfig, facts: SuiteFacts, seen: Collection[str]) -> Iterator[str]:
    """Yield a remark on each named reward that no tried answer got, if the environment does not list its rewards.

    A right answer may get rewards that an empty one does not, so this is no refusal.
    """
    if facts.reward_names is not None or not seen:
        return
    for field, name in needed_rewards(config.learner):
        if name not in seen:
            what = "" if field.endswith(f".{name}") else f' is "{name}"'
            yield (
                f"{field}{what}: the tried answers got no reward of this name{nearest(name, list(seen))} (rewards: "
                f"{', '.join(sorted(seen))}); if it is right, list it in SuiteFacts.reward_names"
            )


def missing_marks(config: RunConfig, facts: SuiteFacts) -> Iterator[str]:
    """Yield the refusal of each mark that the environment is known not to give."""
    if (names := facts.mark_names) is None:
        return
    for field, name in needed_marks(config.learner):
        if name not in names:
            yield (
                f'{field} needs the mark "{name}" of each turn, which the environment does not give (marks: '
                f"{', '.join(names) or 'none'}); add it to StepResult.marks (docs/extend/environments.md), or choose a "
                "method without it"
            )
