"""Combinations of roles in a run file that can never work, each with the cure.

A rule of one section stands beside the section, and those of `[learner]` as a whole in `learner.settings.rules`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envs.rows.judge import OWN, asks_own_judge
from launch.run_file.sections import RunConfig
from learner.settings import rules
from learner.settings.advantages import GaeAdvantage
from learner.settings.families import TaughtFamily, VerdictFamily
from protocol.errors import AddressRefused
from protocol.security.addresses import split_address, why_not_bound


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


def versions_untaken(config: RunConfig) -> Iterator[str]:
    """Yield why no generator would take the versions that the learner publishes, where it trains adapters."""
    lora, taken = config.learner.lora, config.generator.adapter_rank
    if lora is None or lora.publish != "adapter":
        if taken:
            yield (
                f"generator.adapter_rank is {taken}, but the learner publishes whole weights; leave "
                "generator.adapter_rank out"
            )
    elif config.generator.backend == "http":
        yield (
            'learner.lora.publish is "adapter" but generator.backend is "http", which takes whole weights; set publish '
            'to "merged"'
        )
    elif lora.rank > taken:
        yield (
            f'learner.lora.publish is "adapter" with learner.lora.rank = {lora.rank}, but generators take adapters of '
            f'rank {taken} at most; leave generator.adapter_rank out, or set publish to "merged" for a rank above 512'
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


def contradictions(config: RunConfig) -> Iterator[str]:
    """Yield one line per contradiction: field, value seen, cure."""
    yield from config.all_contradictions()
    if not config.learner.steps:
        yield "learner.steps is 0: nothing would be trained; raise it, or evaluate with offbeat eval"
    yield from rules.contradictions(config.learner)
    yield from _replay_table(config)
    yield from _queues(config)
    yield from _windows(config)
    yield from _evaluation_sets(config)
    yield from _lengths(config)
    yield from _deadlines(config)
    yield from _roles(config)
    yield from _supervisor(config)
    yield from _fleet(config)
    yield from _refused_addresses(config)
    yield from _judge(config)
    yield from _teachers(config)


def _replay_table(config: RunConfig) -> Iterator[str]:
    """Yield the mistake that the replay table itself finds: it would give nothing, or less than its share."""
    from learner.errors import ReplayConfigError
    from learner.replay.table import replay_table

    try:
        replay_table(config.learner)
    except ReplayConfigError as error:
        yield str(error)


def _judge(config: RunConfig) -> Iterator[str]:
    each = [table.get("params", {}) for table in env_tables(config)]
    asked = any(asks_own_judge(own) for own in each if isinstance(own, dict))
    own = any(teacher.url == OWN for teacher in config.actor.teachers)
    if own and config.judge is None:
        yield 'actor.teachers has url = "own", but there is no [judge]; add the section, or name the URL of a teacher'
    if asked and config.judge is None:
        yield 'a reward has judge = "own", but there is no [judge]; add the section, or name the URL of a judge'
    if config.judge is not None and not config.actor.count:
        yield (
            "[judge] serves the actors of this host alone, but actor.count is 0; raise it, or name the URL of a judge "
            "in the reward"
        )
    if config.judge is not None and not asked and not own:
        yield (
            '[judge] would start a model that nobody asks; write judge = "own" in a reward, or url = "own" in '
            "[[actor.teachers]], or take [judge] out"
        )


def _teachers(config: RunConfig) -> Iterator[str]:
    """Yield the teachers that a family asks and no actor has, and those that nobody asks."""
    family, field = config.learner.family, "teachers"
    asked: tuple[str, ...] = family.teachers if isinstance(family, TaughtFamily) else ()
    if isinstance(family, VerdictFamily) and family.judge:
        field, asked = "judge", (family.judge,)
    known = [teacher.name for teacher in config.actor.teachers]
    for name in dict.fromkeys(name for name in asked if name not in known):
        yield f"learner.family.{field} has {name!r}, but [[actor.teachers]] has {known or 'no tables'}; add it there"
    for name in (name for name in known if name not in asked):
        yield (
            f"actor.teachers has {name!r}, which nobody asks; name it in learner.family.teachers of a family of kind "
            '"taught", or in learner.family.judge of kind "verdict", or take it out'
        )


def env_tables(config: RunConfig) -> list[dict[str, Any]]:
    """Return name, label and params of each environment, as the run file has them."""
    params = config.env.params
    several = params.get("environments") if config.env.name == "several" else None
    tables = several if isinstance(several, list) else [{"name": config.env.name, "params": params}]
    return [table for table in tables if isinstance(table, dict)]


def _queues(config: RunConfig) -> Iterator[str]:
    learner, broker = config.learner, config.broker
    members = learner.largest_group if learner.train_on == "groups" else 1
    batch = learner.units_per_batch * members
    capacity = (config.max_policy_lag + 1) * batch
    lag = "forced_lag" if config.run.mode == "sync" else "max_policy_lag"
    what = f"learner.{lag} {config.max_policy_lag} with batches of {batch}"
    # One set is evaluated at a time.
    answers = max((of.answers for of in learner.evaluation_sets.values()), default=0)
    if capacity + answers > broker.max_queued_tasks:
        yield (
            f"{what} and {answers} evaluation tasks needs room for "
            f"{capacity + answers} tasks, but broker.max_queued_tasks is "
            f"{broker.max_queued_tasks}; raise it or lower the lag"
        )
    if capacity > broker.max_queued_segments:
        yield (
            f"{what} needs room for {capacity} trajectories of at least one segment, but "
            f"broker.max_queued_segments is {broker.max_queued_segments}: the bound could never be reached; "
            "raise it or lower the lag"
        )
    if learner.data_timeout_s <= broker.group_deadline_s:
        yield (
            f"learner.data_timeout_s {learner.data_timeout_s:g} is not longer than broker.group_deadline_s "
            f"{broker.group_deadline_s:g}: the learner would give up before an incomplete group comes; raise it"
        )


def _windows(config: RunConfig) -> Iterator[str]:
    advantage, window = config.learner.algorithm.advantage, config.actor.segment_tokens
    if config.learner.train_on != "windows":
        return
    if window < 2:
        yield f"actor.segment_tokens is {window}: windows to train on hold at least 2 tokens; raise it"
    elif isinstance(advantage, GaeAdvantage) and advantage.ignored_tail >= window:
        yield (
            f"learner.algorithm.advantage.ignored_tail is {advantage.ignored_tail}, but windows hold "
            f"actor.segment_tokens = {window}: no unfinished one would train anything; lower ignored_tail or raise "
            "segment_tokens"
        )
    room, needed = (
        config.actor.count * config.actor.concurrent_episodes,
        config.learner.batch_trajectories + bool(config.learner.evaluation_sets),
    )
    # With 0 the actors are on other hosts, and their number is not known.
    if config.windows_in_step and config.actor.count and room < needed:
        yield (
            "run.mode is sync and learner.train_on is windows, where every trajectory of a batch stands still at the "
            f"end of its window, but actor.count x actor.concurrent_episodes is {room}, and {needed} are needed (one "
            "more than the batch, if there are evaluations); raise concurrent_episodes"
        )


def _evaluation_sets(config: RunConfig) -> Iterator[str]:
    labels = [str(table.get("label", table.get("name"))) for table in env_tables(config)]
    for name, of in config.learner.evaluation.items():
        field = f"learner.evaluation.{name}"
        if of.env and (config.env.name != "several" or of.env not in labels):
            yield (
                f"{field}.env is {of.env!r}, but no [[env]] table has this label; there are {', '.join(labels)}"
                if config.env.name == "several"
                else f"{field}.env is {of.env!r}, but the run has one [env]; write [[env]] tables, or leave it out"
            )


def _lengths(config: RunConfig) -> Iterator[str]:
    sampling = config.learner.sampling
    if sampling.context_tokens > config.generator.max_model_len:
        yield (
            f"learner.sampling.{sampling.context_setting} {sampling.context_tokens} is longer than "
            f"generator.max_model_len {config.generator.max_model_len}; raise the latter"
        )


def _deadlines(config: RunConfig) -> Iterator[str]:
    actor, episode = config.actor, config.learner.sampling.max_trajectory_s
    turn = actor.generator_timeout_s + actor.env_timeout_s
    if episode < turn:
        yield (
            f"learner.sampling.max_trajectory_s {episode:g} is shorter than one turn may take: "
            f"actor.generator_timeout_s {actor.generator_timeout_s:g} for its tokens and actor.env_timeout_s "
            f"{actor.env_timeout_s:g} for the environment; raise it to at least {turn:g}, or lower these"
        )


def _roles(config: RunConfig) -> Iterator[str]:
    learner, sync = config.learner, config.run.mode == "sync"
    if sync and learner.publish_every != 1:
        yield f"run.mode is sync but learner.publish_every is {learner.publish_every}: lockstep needs 1"
    if learner.under_way == "needed" and sync:
        yield (
            'learner.under_way is "needed" but run.mode is sync, where one batch is under way and nothing is sampled '
            'ahead; set run.mode to "async", or under_way to "bound"'
        )
    if learner.forced_lag and not sync:
        yield (
            f"learner.forced_lag is {learner.forced_lag} but run.mode is async, where lag is what it is; set run.mode "
            'to "sync", or forced_lag to 0'
        )
    if config.generator.evaluators and sync:
        yield (
            f"generator.evaluators is {config.generator.evaluators} but run.mode is sync, where nothing goes on beside "
            "an evaluation; set it to 0"
        )
    yield from routes_untold(config)
    yield from versions_untaken(config)
    yield from sleep_impossible(config)


def _fleet(config: RunConfig) -> Iterator[str]:
    fleet = config.fleet
    if not fleet.auto:
        return
    if config.run.mode == "sync":
        yield (
            'fleet.auto is true, but run.mode is "sync", in which learner and generators wait for each other by turns; '
            "leave fleet.auto out"
        )
    for role, bounds in (("generator", fleet.generators), ("actor", fleet.actors)):
        count = getattr(config, role).count
        if bounds is not None and count and not bounds[0] <= count <= bounds[1]:
            yield (
                f"{role}.count is {count}, and fleet.{role}s = {list(bounds)} with fleet.auto; change one of them"
            )


def _supervisor(config: RunConfig) -> Iterator[str]:
    silence, heartbeat = config.supervisor.silence_s, config.broker.heartbeat_s
    if silence < 3 * heartbeat:
        yield (
            f"supervisor.silence_s {silence:g} is less than three times broker.heartbeat_s {heartbeat:g}: "
            f"processes that are well would be killed; raise it to at least {3 * heartbeat:g}"
        )


def _refused_addresses(config: RunConfig) -> Iterator[str]:
    """Yield the addresses that a role would refuse to bind."""
    keys = Path() if config.security.encrypt else None
    for setting, endpoint in (
        ("broker.endpoint", config.broker.endpoint),
        ("generator.endpoint", config.generator.endpoint),
    ):
        if why := why_not_bound(setting, endpoint, encrypted=keys is not None):
            yield why
    for setting, address in (
        ("broker.http", config.broker.http),
        ("weights.http", config.weights.http),
        ("generator.weights_http", config.generator.weights_http),
    ):
        try:
            if address:
                split_address(setting, address, keys)
        except AddressRefused as error:
            yield str(error)
