"""Reads a run file: merges it over the files and the method it extends, applies overrides, checks types and rules."""

import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

import recipes
from actors.config import GeneratorConfig
from envs.errors import EnvError
from envs.registry import beside
from envs.user_code import absolute_beside_run_file, beside_run_file, code_beside_run_file
from launch.errors import ConfigError
from launch.run_file.rules import contradictions
from launch.run_file.sections import RunConfig
from learner.settings.formulas import with_own_formulas
from learner.settings.given import Conversations

RECIPES_FOLDER = Path(recipes.__path__[0])
METHODS_FOLDER = RECIPES_FOLDER / "methods"


def run_files(folder: Path = RECIPES_FOLDER) -> dict[str, Path]:
    """Return the run files of a folder and of the folders in it, by name, sorted.

    Example:
        >>> run_files()["bapo"].relative_to(RECIPES_FOLDER).as_posix()
        'methods/bapo.toml'
    """
    return {path.stem: path for path in sorted(folder.rglob("*.toml"), key=lambda path: path.stem)}


MEANT = {
    "reinforce++": "reinforce-plus-plus",
    "reinforce++-baseline": "reinforce-plus-plus",
    "drgrpo": "dr-grpo",
    "dr_grpo": "dr-grpo",
    "dr.grpo": "dr-grpo",
    "tis": "decoupled-ppo",
    "truncated-importance-sampling": "decoupled-ppo",
}
"""Other names of methods, in small letters."""


def located(name: Path) -> Path:
    """Return the file of this name, or the shipped run file that is meant, or ``name`` if there is neither.

    A shipped run file is named without folder and ending, or as a file of recipes/, where all of them were once.

    Example:
        >>> located(Path("bapo")) == located(Path("recipes/bapo.toml")) == RECIPES_FOLDER / "methods" / "bapo.toml"
        True
        >>> located(Path("other/bapo.toml")).as_posix()
        'other/bapo.toml'
    """
    if name.is_file():
        return name
    bare = name.parent == Path() and not name.suffix
    was_there = name.parent.name == RECIPES_FOLDER.name and name.suffix == ".toml"
    # A name such as `dr.grpo` has no ending, though it has a dot.
    meant = MEANT.get(name.name.lower())
    if meant is not None:
        return run_files()[meant]
    return run_files().get(name.stem, name) if bare or was_there else name


METHOD_SETTINGS = {
    "algorithm": "the objective, whole",
    "train_on": "what a batch is made of",
    "replay": "trajectories that are trained again",
    "family": "groups that ask for further groups",
    "lane": "members of a group that are sampled at another temperature",
    "taught": "answers of teachers in groups that nobody solved",
    "selection": "which task comes next; how many tasks there are belongs to the job",
    "budget": "how a list's answers are shared out among its tasks",
    "reward": "how rewards become the values that are compared",
    "filter_uniform_groups": "whether groups that train nothing are left out, or counted",
    "group_size": "how many answers to one task the advantage needs",
    "max_policy_lag": "the staleness up to which the method was seen to keep its reward",
}
"""Settings of `[learner]` that belong to a method, each with what it is.

The rule: a setting belongs to the method if a job with other lengths, another model and another environment would
need it, too. Lengths, sizes, steps, the optimizer and the numbers of roles belong to the job.
"""
REPLACED = ("algorithm", "train_on", "replay", "family", "lane", "taught")
"""Settings that a method replaces as a whole, so that no half of a former method is left."""
DEMO = "demo"
"""Table of a method file with the settings of the job that shows the method."""


def of_method_file(path: Path, content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a file's content into its settings and those of its demo.

    A method file has the table `[recipe]`, and is named after its method. Other files have no demo.

    Example:
        >>> of_method_file(Path("bapo.toml"), {"recipe": {}, "learner": {"replay": {}}, "demo": {"actor": {}}})
        ({'method': 'bapo', 'recipe': {}, 'learner': {'replay': {}}}, {'actor': {}})
        >>> of_method_file(Path("job.toml"), {"learner": {"steps": 9}})
        ({'learner': {'steps': 9}}, {})
    """
    if "recipe" not in content:
        return dict(content), {}
    settings = {name: value for name, value in content.items() if name != DEMO}
    return {"method": path.stem, **settings}, dict(content.get(DEMO, {}))


def method_file(name: Any, source: Path) -> Path:
    """Return the file of a method: a shipped one by its name, or a file relative to ``source``.

    Args:
        name: value of `method` in the run file.
        source: run file that names the method.

    Raises:
        ConfigError: there is no such method; the text names the nearest one.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{source}: method is {name!r}; write the name of one method, as a string")
    methods = run_files(METHODS_FOLDER)
    name = MEANT.get(name.lower(), name)
    if name in methods:
        return methods[name]
    file: Path = source.parent / name
    if file.suffix == ".toml" and file.is_file():
        return file
    if name in run_files():
        cure = f'it is a job, not a method; write extends = "{name}"'
    elif near := difflib.get_close_matches(name, methods, n=1):
        cure = f"did you mean {near[0]!r}?"
    else:
        cure = f"there are: {', '.join(methods)}"
    raise ConfigError(f"{source}: method {name!r} is unknown; {cure}")


def method_settings(path: Path, content: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Return the settings that a method file brings into a job.

    Args:
        path: file of the method.
        content: the file's own content.
        source: run file that names the method.

    Raises:
        ConfigError: the file sets something that belongs to a job; `extends` takes such a file.
    """
    learner = content.get("learner", {})
    foreign = [name for name in content if name not in ("extends", "recipe", "learner", DEMO)]
    if isinstance(learner, Mapping):
        foreign += [f"learner.{name}" for name in learner if name not in METHOD_SETTINGS]
    if foreign or not isinstance(learner, Mapping):
        raise ConfigError(
            f"{source}: method {path.stem!r} ({path}) sets {', '.join(foreign) or 'learner'}, which belongs to a job; "
            f"a method sets only learner.{', learner.'.join(METHOD_SETTINGS)}. Move the rest to [{DEMO}], or write "
            f'extends = "{path.stem}" to take the whole job'
        )
    recipe = {name: content[name] for name in ("recipe",) if name in content}
    return {"method": path.stem, **recipe, "learner": dict(learner)}


def without_method(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the method that they have, as far as the next one replaces it.

    Example:
        >>> without_method({"method": "ppo", "learner": {"steps": 9, "train_on": "trajectories"}, "env": {}})
        {'learner': {'steps': 9}, 'env': {}}
        >>> without_method({"learner": {"reward": {"weights": {"short": 0.5}, "group": {"kind": "win_rate"}}}})
        {'learner': {'reward': {'weights': {'short': 0.5}}}}
    """
    kept = {name: value for name, value in settings.items() if name not in ("method", "recipe")}
    learner = kept.get("learner")
    if isinstance(learner, Mapping):
        kept["learner"] = {name: value for name, value in learner.items() if name not in REPLACED}
        if isinstance(reward := learner.get("reward"), Mapping):
            # Weights are of the environment's rewards, so they are the job's; the rest is the former method's.
            kept["learner"]["reward"] = {name: value for name, value in reward.items() if name == "weights"}
    return kept


CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
"""Keys of config.json that may hold the longest sequence of a model."""
ALREADY_SCALED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rotary embedding whose `factor` does not lengthen the context that config.json states."""


def read_description(folder: Path) -> dict[str, Any]:
    """Return the content of a model's config.json.

    Raises:
        ConfigError: there is no config.json, or it is not a JSON object.
    """
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path}: {error}; a model folder has one") from None
    if not isinstance(content, dict):
        raise ConfigError(f"model.path: {path}: expected an object, found {type(content).__name__}")
    return content


def context_of(content: dict[str, Any]) -> int | None:
    """Return the longest sequence that the content of a config.json allows, scaling included.

    Example:
        >>> context_of({"max_position_embeddings": 2048})
        2048
        >>> context_of({"n_positions": 1024, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
        4096
        >>> context_of({"text_config": {"max_position_embeddings": 512}}), context_of({})
        (512, None)
    """
    for part in (content.get("text_config"), content):
        if not isinstance(part, dict):
            continue
        stated = [part[key] for key in CONTEXT_KEYS if type(part.get(key)) is int and part[key] > 0]
        if stated:
            return int(max(stated) * _stretch(part.get("rope_scaling") or part.get("rope_parameters")))
    return None


def _stretch(rope: Any) -> float:
    if not isinstance(rope, dict):
        return 1.0
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor")
    if kind in ALREADY_SCALED or isinstance(factor, bool) or not isinstance(factor, int | float):
        return 1.0
    return factor if 0 < factor < math.inf else 1.0


def fitted(data: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return a run file's content with a `generator.max_model_len` that its model allows, if the file leaves it out.

    The model has to be a folder of this host. The model of a hub, or of another host, is held against the setting when
    the run starts; see `launch.preflight.model_limits`.

    Args:
        data: content of the run file, not checked yet.
        longest: `generator.max_model_len` of a model with no smaller limit, in tokens.

    Example:
        >>> fitted({"model": {"path": "no such folder"}}, 1024)
        {'model': {'path': 'no such folder'}}
    """
    generator, model = data.get("generator", {}), data.get("model", {})
    path = model.get("path") if isinstance(model, dict) else None
    # Values of a wrong type are reported by the fields themselves.
    if (
        not isinstance(generator, dict)
        or "max_model_len" in generator
        or not isinstance(path, str)
        or not path
    ):
        return data
    try:
        context = context_of(read_description(Path(path)))
    except ConfigError:
        return data
    if context is None or context >= longest:
        return data
    return {**data, "generator": {**generator, "max_model_len": context}}


FORM_NAMED_BY = {"env": "name"}
"""Keys that name a table's form in place of `kind`: a different environment has different params."""


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file, or a shipped recipe by name, and all that it extends. Apply overrides, check types and rules.

    An override is ``key.path=value``. The override ``method=NAME`` replaces the method of the file.

    Raises:
        ConfigError: something is wrong; one line per mistake, with field, value seen and cure.
    """
    data, overlay = read(path), _overlay(overrides)
    if "method" in overlay:
        data = with_method(data, overlay.pop("method"), Path("command line"))
    for override in overrides:
        _check_parents(overlay, data, override)
    content = fitted(merge(data, overlay), GeneratorConfig().max_model_len)
    return with_files(check(content, str(path)), located(path).parent)


def with_files(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration with paths by which every role finds the files of the environment and of own formulas.

    Args:
        folder: folder of the run file, in which a file is looked for that is not in the working folder.

    Raises:
        ConfigError: there is no environment of this name.
    """
    try:
        name, params = beside(config.env.name, config.env.params, folder)
    except EnvError as error:
        raise ConfigError(f"env: {error}") from None
    learner = with_own_formulas(
        config.learner,
        lambda own: own.model_copy(
            update={"kind": code_beside_run_file(own.kind, folder, absolute_beside_run_file)}
        ),
    )
    learner = learner.with_sections(
        lambda part: (
            part.model_copy(update={"file": beside_run_file(part.file, folder)})
            if isinstance(part, Conversations) and part.file
            else part
        )
    )
    env = config.env.model_copy(update={"name": name, "params": params})
    return config.model_copy(update={"env": env, "learner": learner})


def read(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the content of a run file, merged over its method, and that over the file it extends.

    The file it extends may extend a further file, and have a method of its own. Files may be named as shipped
    recipes, without folder and ending; see `launch.run_file.load`.

    Raises:
        ConfigError: a file cannot be read or is not TOML; files extend each other in a circle; there is no such
            method.
    """
    path = located(path)
    own = read_own(path)
    base = _base(path, own.pop("extends", None), extended_by)
    if "method" in own:
        return merge(with_method(base, own.pop("method"), path), own)
    content, demo = of_method_file(path, own)
    return merge(merge(base, content), demo)


def with_method(settings: dict[str, Any], name: Any, source: Path) -> dict[str, Any]:
    """Return settings with a method in place of the one they have; see `launch.run_file.load`.

    Raises:
        ConfigError: there is no such method, or its file sets more than a method.
    """
    path = method_file(name, source)
    return merge(without_method(settings), method_settings(path, read_own(path), source))


def _base(path: Path, base: Any, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    """Return the content of the file that ``path`` extends; empty if it extends none."""
    if base is None:
        return {}
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends is {base!r}; write the name of one file, as a string")
    file, chain = path.parent / base, (*extended_by, path.resolve())
    file = file if file.is_file() else located(Path(base))
    if not file.is_file():
        raise ConfigError(
            f"{path}: extends {base!r}: there is no file {path.parent / base}, and `offbeat recipes` lists no "
            f"such recipe; name a file relative to {path}, or a recipe"
        )
    if file.resolve() in chain:
        names = " -> ".join(p.name for p in (*chain, file.resolve()))
        raise ConfigError(f"{path}: extends {base!r} makes a circle: {names}; take one extends out")
    return read(file, chain)


def read_own(path: Path) -> dict[str, Any]:
    """Return the content of this file alone.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name a run file, or one of `offbeat recipes`"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` merged into it.

    Tables are merged key by key; anything else is replaced. A table of a different ``kind``, or of a
    different environment, replaces the whole table.

    Example:
        >>> merge({"a": {"kind": "x", "low": 1}, "b": [1, 2], "c": {"d": 1}}, {"a": {"kind": "y"}, "c": {"e": 2}})
        {'a': {'kind': 'y'}, 'b': [1, 2], 'c': {'d': 1, 'e': 2}}
        >>> merge({"env": {"name": "x", "params": {"low": 1}}}, {"env": {"name": "y"}})
        {'env': {'name': 'y'}}
    """
    merged = dict(base)
    for key, value in over.items():
        below = base.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and _same_form(key, below, value):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def _same_form(key: str, base: dict[str, Any], over: dict[str, Any]) -> bool:
    form = FORM_NAMED_BY.get(key, "kind")
    return bool(over.get(form, base.get(form)) == base.get(form))


def check(data: dict[str, Any], source: str) -> RunConfig:
    """Validate a run file's content; see `load`."""
    if isinstance(data.get("env"), list):
        data = {**data, "env": {"name": "several", "params": {"environments": data["env"]}}}
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, source) for e in error.errors())) from None
    if problems := list(contradictions(config)):
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    return config


def with_overrides(config: RunConfig, overrides: Sequence[str], source: str) -> RunConfig:
    """Return settings that were loaded before, with some of them overridden.

    Args:
        source: where the settings come from, for errors.

    Raises:
        ConfigError: an override does not fit.
    """
    data = json.loads(config.model_dump_json())
    over = _overlay(overrides)
    for override in overrides:
        _check_parents(over, data, override)
    try:
        return RunConfig.model_validate_json(json.dumps(merge(data, over)))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, source) for e in error.errors())) from None


def _overlay(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the overrides as one table, to be merged over the file's content."""
    overlay: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"override {override!r}: write it as section.field=value, for example learner.steps=20"
            )
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *parents, last = key.split(".")
        table: Any = overlay
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
        table[last] = value
    return overlay


def _check_parents(overlay: dict[str, Any], data: dict[str, Any], override: str) -> None:
    """Reject overrides that turn a value of the file into a section, unless they give a `kind`."""
    over: Any = overlay
    below: Any = data
    for parent in override.partition("=")[0].split(".")[:-1]:
        over, below = over[parent], below.get(parent, {})
        if not isinstance(below, dict):
            if "kind" in over:
                return
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")


MEANT_SETTINGS = {
    "learner.optimizer.lr": ("lr", "learning_rate"),
    "learner.optimizer.weight_decay": ("weight_decay",),
    "learner.optimizer.warmup_steps": ("warmup_steps", "lr_warmup_steps"),
    "learner.optimizer.max_grad_norm": ("max_grad_norm", "grad_clip"),
    "learner.batch_trajectories": ("batch_size", "train_batch_size", "rollout_batch_size"),
    "learner.group_size": ("num_generations", "rollouts", "n", "n_samples_per_prompt"),
    "learner.steps": ("max_steps", "total_steps", "num_steps"),
    "learner.sampling.temperature": ("temperature",),
    "learner.sampling.max_turn_tokens": ("max_tokens", "max_new_tokens", "max_completion_length"),
    "learner.algorithm.kl.coefficient": ("beta", "kl_coef", "kl_coefficient"),
    "learner.algorithm.surrogate.low": ("epsilon", "clip_low", "cliprange", "clip_ratio"),
    "learner.algorithm.surrogate.high": ("epsilon_high", "clip_high", "clip_ratio_high"),
    "learner.algorithm.entropy.coefficient": ("entropy_coef", "entropy_coefficient"),
    "learner.algorithm.updates_per_batch": ("num_minibatches", "mini_batches"),
    "learner.algorithm.passes": ("num_iterations", "ppo_epochs", "epochs_per_batch"),
    "model.path": ("model_name", "model_name_or_path"),
    "run.seed": ("seed",),
}
"""Settings by their place in the run file, with the names that other programs have for them."""


def meant(key: str) -> str:
    """Return the setting that a key means in other programs; "" if it is none of them.

    Example:
        >>> meant("lr"), meant("num_generations"), meant("group_sise")
        ('learner.optimizer.lr', 'learner.group_size', '')
    """
    return next((setting for setting, names in MEANT_SETTINGS.items() if key.lower() in names), "")


def _explain(error: Any, source: str) -> str:
    names, sections = _locate(error["loc"])
    place = ".".join(names) or "(top level)"
    match error["type"]:
        case "extra_forbidden":
            names, sections = _locate(error["loc"][:-1])
            known = sorted({name for section in sections for name in section.model_fields})
            near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
            if setting := meant(str(error["loc"][-1])):
                return f"{source}: {place}: unknown key (value {error['input']!r}); did you mean {setting!r}?"
            cure = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
            return f"{source}: {place}: unknown key (value {error['input']!r}); {cure}"
        case "missing":
            return f"{source}: {place}: missing; add it"
        case "union_tag_not_found":
            kinds = ", ".join(sorted(kind_of(section) for section in sections))
            return f"{source}: {place}: the form is not said; add {place}.kind, one of {kinds}"
        case "union_tag_invalid":
            kinds = ", ".join(sorted(kind_of(section) for section in sections))
            return f"{source}: {place}.kind: unknown kind {error['ctx']['tag']!r}; use one of {kinds}"
        case _:
            return f"{source}: {place}: {error['msg']}, got {error['input']!r}"


def _locate(location: tuple[Any, ...]) -> tuple[list[str], list[type[BaseModel]]]:
    """Return the keys on the way to a place in the run file, and the sections that may stand there."""
    names: list[str] = []
    sections: list[type[BaseModel]] = [RunConfig]
    fields: list[FieldInfo] = []
    named = False
    for part in location:
        if not isinstance(part, int):
            forms = [s for s in sections if part in (kind_of(s), s.__name__)]
            # This part names the form that pydantic tried; it is not a key of the file.
            if forms or "[" in part:
                sections = forms or sections
                continue
            # A value has no keys, so this part names the type that pydantic tried.
            if not sections and not named:
                continue
            if not named:
                fields = [s.model_fields[part] for s in sections if part in s.model_fields]
                sections = [s for field in fields for s in sections_in(field.annotation)]
            # In a table of named sections the next part is a name.
            named = not named and any(get_origin(field.annotation) is dict for field in fields)
        names.append(str(part))
    return names, sections


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections in a field's type; several, where the field has several forms."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def kind_of(section: type[BaseModel]) -> str:
    """Return the `kind` of this form of a section, or "" where there is only one form."""
    kind = section.model_fields.get("kind")
    return str(kind.default) if kind is not None else ""
