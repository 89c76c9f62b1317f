"""The ticket of a host: one file with all that the host needs to join a run, and the checks of it.

A ticket has the merged run file, the addresses of broker and weights server, the keys of this host and no others, the
names and hashes of the model's files, and the file of a user's own environment. It is a secret: a file of mode 600, and
never a part of a command line, of a log, or of a rendered script.
"""

import hashlib
import os
import re
import secrets
import socket
import stat
import sys
import tomllib
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import Field, ValidationError

from envs.registry import files_of, fingerprint
from envs.user_code import ROOT, code_file
from launch.errors import ConfigError
from launch.fleet.ray_actor import TASK
from launch.run_file.sections import RunConfig
from launch.run_folder import ASKED, CONFIG, keys_folder, load_config
from protocol.codec import MAJOR, MINOR
from protocol.digest import digest
from protocol.errors import KeysUnusable
from protocol.files import write_whole
from protocol.section import Section
from protocol.security import key_files
from protocol.security.addresses import is_loopback, is_wildcard, split_endpoint
from protocol.security.http import PRIVATE_FILE
from protocol.security.keys import HOST, refuse_open_secret
from protocol.weights.server import MODEL_FILE, url_for_others

MAX_TICKET_BYTES = 4 << 20
MAX_SOURCE_BYTES = 1 << 20
"""Longest file of a user's environment that travels in a ticket."""
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VARIABLE = "OFFBEAT_TICKET"
"""Environment variable with the path of the ticket. Its content is no variable, because children would inherit it."""
CREDENTIALS, CREDENTIAL = "CREDENTIALS_DIRECTORY", "offbeat-ticket"
"""systemd's variable with the folder of a unit's credentials, and the name of the ticket among them."""
ARRAY_INDICES = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX", TASK)
"""Environment variables with the number of a task in its array: of engines, and of our own actors of Ray."""
FREE_ON_HOST = (
    "generator.devices",
    "generator.threads",
    "generator.gpu_memory_utilization",
    "generator.kv_cache_mb",
    "generator.endpoint",
    "generator.advertised_host",
    "generator.rack",
    "generator.weights_http",
    "run.dir",
    "model.cache",
)
"""Settings that are of a host alone, so that its owner may override them. Counts are options of the command."""
READ_BYTES = 1 << 20


class ModelFile(Section):
    """One file of the model's folder."""

    nbytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Ticket(Section):
    """What a host needs. Fields that are empty do not apply to the run."""

    offbeat: str
    """Version of the product on the head."""
    protocol: str
    """Version of the protocol on the head, as MAJOR.MINOR."""
    run: str = Field(min_length=1)
    """Name of the run as its broker has it."""
    host: str = ""
    """Name of the host; "": the ticket is for any host."""
    label: str = ""
    """What the names of hosts begin with, in a ticket for any host."""
    config: RunConfig
    """The run file, merged, with the addresses by which this host reaches the head."""
    weights: str = ""
    """URL of the weights server; "": only the learner's host has the versions."""
    keys: dict[str, str] = Field(default_factory=dict)
    """Files of the keys folder. Secret."""
    model: dict[str, ModelFile] = Field(default_factory=dict)
    """Files of the model, which the weights server has; empty: the model is of the hub."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Content of the file of the user's own environment, by its path on the head."""
    others: dict[str, str] = Field(default_factory=dict)
    """Hashes of further files that the environment reads, which the host has to have, by path."""
    digest: str = ""
    """What all peers of the run must have alike, see `protocol.digest`."""

    def names_of_host(self, environment: Mapping[str, str], hostname: str) -> str:
        """Return the name of this host: the ticket's, or one made of its label and what tells hosts apart.

        Example:
            >>> any_host = Ticket.model_construct(host="", label="gpu")
            >>> any_host.names_of_host({"SLURM_ARRAY_TASK_ID": "3"}, "node7")
            'gpu-3'
            >>> any_host.names_of_host({}, "node7.cluster"), any_host.names_of_host({}, "...")
            ('gpu-node7.cluster', 'gpu-host')
        """
        if self.host:
            return self.host
        own = next((environment[name] for name in ARRAY_INDICES if environment.get(name)), hostname)
        return name_of_host(self.label, own)


def name_of_host(label: str, own: str) -> str:
    """Return the name of a host that shares its ticket with others.

    Args:
        label: label of the ticket.
        own: what tells the host apart, such as the name of its machine.

    Example:
        >>> name_of_host("g", "node7"), name_of_host("g", "offbeat-a-long-name-of-a-run-generators-7d9f8c6b5-x2x4z")
        ('g-node7', 'g-offbeat-a-long-name-of-a-run-generators-f236011c')
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", own).strip(".-") or "host"
    if len(plain) > LONGEST_OWN:
        # Names of pods differ at their ends.
        plain = f"{plain[: LONGEST_OWN - 9]}-{blake2b(plain.encode(), digest_size=4).hexdigest()}"
    return f"{label}-{plain}"


LONGEST_OWN = 48


# --- making -----------------------------------------------------------------------------------------------


def make_ticket(folder: Path, *, host: str = "", label: str = "", address: str = "") -> Ticket:
    """Make the ticket of a host, and its key in the keys folder of the run.

    Args:
        folder: run folder of a run that was started with `offbeat train`.
        host: name of the host.
        label: beginning of the names, for a ticket that many hosts share. One of the two is given.
        address: name or address by which hosts reach the head; "": `weights.advertised_host`, or the head's name.

    Raises:
        ConfigError: the name cannot be used, hosts could not reach the run, or a file is missing.
    """
    name = host or label
    if not HOST_NAME.fullmatch(name):
        raise ConfigError(
            f"the host's name is {name!r}; write at most 64 letters, digits, dots, dashes and underscores, "
            "and begin with a letter or digit"
        )
    config = reached_by_hosts(_settings(folder), address)
    sources, others = _files_of_environment(config)
    return Ticket(
        offbeat=product_version(),
        protocol=f"{MAJOR}.{MINOR}",
        run=folder.resolve().name,
        host=host,
        label=label,
        config=config,
        weights=weights_of_host(config, keys_folder(config, folder)),
        keys=_keys_of_host(config, keys_folder(config, folder), f"{HOST}-{name}"),
        model=_files_of_model(config),
        sources=sources,
        others=others,
        digest=digest_of_run(config),
    )


def _settings(folder: Path) -> RunConfig:
    """Return the settings of a run, with the ports of its last start; what the head's hardware decided is left open.

    Raises:
        ConfigError: no run was started in the folder.
    """
    known = [path for name in (CONFIG, "config-broker.json") if (path := folder / name).exists()]
    if not known:
        raise ConfigError(
            f"{folder}: no run was started there; start it with `offbeat train`, then make tickets"
        )
    decided = load_config(known[0])
    asked = load_config(folder / ASKED) if (folder / ASKED).exists() else decided
    return decided.model_copy(
        update={"generator": asked.generator.model_copy(update={"devices": ()}), "actor": asked.actor}
    )


def reached_by_hosts(config: RunConfig, address: str = "") -> RunConfig:
    """Return the settings with the addresses by which a further host reaches the head.

    Args:
        address: name or address of the head; "": it follows from the settings.

    Raises:
        ConfigError: hosts could not reach the head, one line for each setting.
    """
    host, port = split_endpoint(config.broker.endpoint)
    http_host, _, http_port = config.broker.http.rpartition(":")
    served = config.weights.http.rpartition(":")[0]
    if not host:
        raise ConfigError(
            f"broker.endpoint is {config.broker.endpoint}, which only this machine reaches; "
            'set broker.endpoint = "tcp://0.0.0.0:5755"'
        )
    problems = []
    if not is_loopback(host):
        if is_loopback(http_host):
            problems.append(
                f"broker.http is {config.broker.http}, by which hosts judge their processes, and only this machine "
                'reaches it; set broker.http = "0.0.0.0:5756"'
            )
        if not config.weights.http:
            problems.append(
                "weights.http is empty, so generators of hosts would stay at version 0; set weights.http = "
                '"0.0.0.0:5757"'
            )
        elif is_loopback(served):
            problems.append(
                f"weights.http is {config.weights.http}, which only this machine reaches; set weights.http = "
                '"0.0.0.0:5757"'
            )
    if problems:
        raise ConfigError("\n".join(problems))
    own = address or config.weights.advertised_host or socket.gethostname()
    at = own if is_wildcard(host) else host
    http_at = own if is_wildcard(http_host) else http_host
    shown = f"[{at}]" if ":" in at.strip("[]") else at
    broker = config.broker.model_copy(
        update={"endpoint": f"tcp://{shown}:{port}", "http": f"{http_at}:{http_port}"}
    )
    weights = config.weights.model_copy(update={"advertised_host": own if is_wildcard(served) else served})
    return config.model_copy(update={"broker": broker, "weights": weights})


def keys_of_run(folder: Path) -> Path | None:
    """Return the keys folder of a run that was started; None without encryption.

    Raises:
        ConfigError: no run was started in the folder.
    """
    return keys_folder(_settings(folder), folder)


def weights_of_host(config: RunConfig, keys: Path | None) -> str:
    """Return the URL of the weights server for a host; "" if the run has none."""
    if not config.weights.http:
        return ""
    host, _, port = config.weights.http.rpartition(":")
    return url_for_others(host.strip("[]"), int(port), config.weights.advertised_host, keys)


def _keys_of_host(config: RunConfig, folder: Path | None, name: str) -> dict[str, str]:
    """Make the host's key if it is missing. Return the files that the host needs, and no more."""
    if folder is None:
        return {}
    try:
        key_files.make(folder, [name])
        names = [f"{name}.secret", f"{name}.pub", "broker.pub", *key_files.NEEDS[HOST][1]]
        names += [PRIVATE_FILE] if config.generator.weights_http else []
        return {file: (folder / file).read_text(encoding="ascii") for file in names}
    except KeysUnusable as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from None


def _files_of_model(config: RunConfig) -> dict[str, ModelFile]:
    folder = model_folder(config)
    if folder is None:
        return {}
    found = {path.name: _hashed(path) for path in _served(folder)}
    if "config.json" not in found:
        raise ConfigError(f"{folder} holds no config.json, so it is no model that a host could fetch")
    return found


def model_folder(config: RunConfig) -> Path | None:
    """Return the folder of a run's model that hosts fetch; None if they get the model from the hub by its name.

    Raises:
        ConfigError: the tiny model of the run is not made yet.
    """
    from launch.model import existing, is_gguf, kept_model

    path = config.model.path
    if path:
        return existing(config.model) if Path(path).exists() or is_gguf(path) else None
    kept = kept_model(config)
    if kept is None:
        raise ConfigError(
            "the model of the run is not made yet; wait until `offbeat train` says that it has started its processes"
        )
    return kept


def _served(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and re.fullmatch(MODEL_FILE, path.name):
            yield path


def _hashed(path: Path) -> ModelFile:
    digest, nbytes = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            nbytes += len(block)
    return ModelFile(nbytes=nbytes, sha256=digest.hexdigest())


def _files_of_environment(config: RunConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Return the file of the user's own environment with its content, and hashes of all other files."""
    sources, own = {}, code_file(config.env.name)
    paths = [Path(path) for path in files_of(config.env.name, config.env.params)]
    if own and Path(own).stat().st_size <= MAX_SOURCE_BYTES:
        sources[own] = Path(own).read_text(encoding="utf-8")
    elif own:
        paths.append(Path(own))
    return sources, {str(path): digest_of(path) for path in paths if path.is_file()}


def digest_of(path: Path) -> str:
    """Return a short hash of a file's content."""
    return blake2b(path.read_bytes(), digest_size=8).hexdigest()


def digest_of_run(config: RunConfig) -> str:
    """Return the digest of what all peers of a run must have alike: environment, model, tokenizer, product.

    Of a model's folder, the small files count; the hashes of the large ones are in the ticket. The files of a model of
    the hub are not looked at.

    Args:
        config: settings in force, with the hash of the environment's files.
    """
    env = blake2b(config.env.model_dump_json().encode(), digest_size=6)
    env.update(fingerprint(config.env.name, config.env.params).encode())
    try:
        folder = model_folder(config)
    except ConfigError:
        folder = None
    if folder is None:
        model = config.model.path and blake2b(config.model.path.encode(), digest_size=6).hexdigest()
    else:
        model = blake2b(b"".join(map(_small, _served(folder))), digest_size=6).hexdigest()
    return digest({"offbeat": product_version(), "env": env.hexdigest(), "model": model})


def _small(path: Path) -> bytes:
    """Return what the digest of a model takes of a file: name and length, and the hash if it is small."""
    size = path.stat().st_size
    content = digest_of(path) if size <= SMALL_BYTES else ""
    return f"{path.name} {size} {content}\n".encode()


SMALL_BYTES = 32 << 20
"""Longest file of a model that its digest reads: tokenizers and settings are shorter, weights mostly longer."""


def product_version() -> str:
    """Return the version of Offbeat: of the installed package, or of the source that runs."""
    try:
        return version("offbeat")
    except PackageNotFoundError:
        return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


# --- files ------------------------------------------------------------------------------------------------


def write_ticket(ticket: Ticket, path: Path) -> None:
    """Write a ticket with mode 600, whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_whole(path, ticket.model_dump_json(indent=1) + "\n", mode=0o600)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; name a file in a folder that you may write in"
        ) from None


def read_ticket(given: str, environment: Mapping[str, str]) -> Ticket:
    """Read a ticket from a file, from standard input ("-"), or from where the environment says ("").

    Raises:
        ConfigError: there is none, others may read it, it is too long, or it is no ticket of this version.
    """
    where = given or _from_environment(environment)
    if where == "-":
        _refuse_open("standard input", os.fstat(sys.stdin.fileno()).st_mode)
        content = sys.stdin.buffer.read(MAX_TICKET_BYTES + 1)
    else:
        path = Path(where)
        try:
            with open(path, "rb") as file:
                _refuse_open(str(path), os.fstat(file.fileno()).st_mode)
                content = file.read(MAX_TICKET_BYTES + 1)
        except OSError as error:
            raise ConfigError(
                f"--ticket {path}: {error.strerror}; make one with `offbeat ticket RUN`"
            ) from None
    if len(content) > MAX_TICKET_BYTES:
        raise ConfigError(f"--ticket {where}: longer than {MAX_TICKET_BYTES >> 20} MiB, so it is no ticket")
    try:
        return Ticket.model_validate_json(content)
    except ValidationError as error:
        # Not the error's own text, which repeats values of the ticket.
        first = error.errors(include_input=False, include_url=False)[0]
        at = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"--ticket {where}: not a ticket of offbeat {product_version()} ({at or 'content'}: {first['type']}); "
            "make one with `offbeat ticket RUN`, with the same version of offbeat"
        ) from None


def _from_environment(environment: Mapping[str, str]) -> str:
    if environment.get(VARIABLE):
        return environment[VARIABLE]
    if environment.get(CREDENTIALS):
        path = Path(environment[CREDENTIALS]) / CREDENTIAL
        if path.exists():
            return str(path)
    raise ConfigError(
        f"there is no ticket: name it with --ticket FILE, give it on standard input (--ticket -), set {VARIABLE} to "
        f"its path, or load it as the credential {CREDENTIAL} of a systemd unit"
    )


def _refuse_open(name: str, mode: int) -> None:
    """Refuse a ticket that others may read.

    Raises:
        ConfigError: the group may write it, or others may read it.
    """
    if not stat.S_ISREG(mode):
        # A pipe or a socket has no name that others could open.
        return
    try:
        refuse_open_secret(Path(name), mode)
    except KeysUnusable as error:
        raise ConfigError(f"--ticket {error}") from None


def secrets_of(ticket: Ticket) -> list[str]:
    """Return the texts of a ticket that nobody else may see: keys and token, line by line.

    Example:
        >>> secrets_of(Ticket.model_construct(keys={"host-a.secret": "x" * 40, "broker.pub": "y" * 40}))
        ['xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx']
    """
    hidden = [text for name, text in ticket.keys.items() if not name.endswith((".pub", ".crt"))]
    return [line for text in hidden for line in text.split("\n") if len(line) >= MIN_SECRET]


MIN_SECRET = 20
"""Shortest line of a key or a token."""


# --- on the host ------------------------------------------------------------------------------------------


def refuse_other_version(ticket: Ticket) -> None:
    """Refuse a ticket of a head that runs a different version of Offbeat.

    Raises:
        ConfigError: the versions differ; the text has both.
    """
    own = product_version(), f"{MAJOR}.{MINOR}"
    if (ticket.offbeat, ticket.protocol) != own:
        raise ConfigError(
            f"the head runs offbeat {ticket.offbeat} with protocol {ticket.protocol}, this host {own[0]} with "
            f"{own[1]}; install the same version on both"
        )


def refuse_other_files(ticket: Ticket) -> None:
    """Refuse a host whose files differ from those of the head.

    Raises:
        ConfigError: a file is missing or differs, one line each.
    """
    problems = []
    for name, there in ticket.others.items():
        path = Path(name)
        if not path.is_file():
            problems.append(
                f"{path}: the environment of the run reads it, and it is not here; copy it from the head"
            )
        elif (here := digest_of(path)) != there:
            problems.append(f"{path}: its hash is {here}, on the head {there}; copy it from the head")
    if problems:
        raise ConfigError("\n".join(problems))


def unpack(ticket: Ticket, folder: Path) -> tuple[Path | None, dict[str, Path]]:
    """Write the keys and the sources of a ticket to the folder of a host.

    Returns:
        The keys folder, None without encryption; and the paths of the sources by those on the head.
    """
    keys = folder / "keys" if ticket.keys else None
    if keys is not None:
        keys.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys.chmod(0o700)
        for name, text in ticket.keys.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ConfigError(f"the ticket has a key file called {name!r}; make it anew")
            public = name.endswith((".pub", ".crt"))
            write_whole(keys / name, text, mode=0o644 if public else 0o600)
    placed = {}
    for number, (name, text) in enumerate(ticket.sources.items()):
        # The stem stays, because errors and `content` name it.
        path = folder / "env" / str(number) / Path(name).name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        placed[name] = path
    return keys, placed


def fresh_label(keys: Path | None) -> str:
    """Return a name for a host that the user gave none: the first of h1, h2, ... without a key.

    Example:
        >>> fresh_label(Path("/nowhere"))
        'h1'
    """
    if keys is None:
        return f"h{secrets.randbelow(9_000) + 1_000}"
    number = 1
    while (keys / f"{HOST}-h{number}.pub").exists():
        number += 1
    return f"h{number}"
