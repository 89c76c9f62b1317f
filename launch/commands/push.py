"""`offbeat push`: uploads an exported model, with its card, to the hub of Hugging Face by the hub's own client."""

import sys
from pathlib import Path

from launch.errors import ConfigError
from launch.model_card import CARD, exported, read_summary
from learner.run_files import ADAPTER_FOLDER, BEST, best_model, step_model

SHOWN_CHARS = 300


def push(
    run: Path,
    repo: str,
    *,
    best: bool = False,
    step: int | None = None,
    adapter: bool = False,
    public: bool = False,
) -> int:
    """Upload a model of a run. Return the exit code.

    Args:
        run: run folder.
        repo: OWNER/NAME of the repository on the hub, which is made unless it is there.
        best: upload the model with the best evaluation in place of the last one.
        step: upload the model that was exported after this step.
        adapter: upload the adapters alone.
        public: whether a repository that is made can be read by everybody.

    Raises:
        ConfigError: there is no such model, the name of the repository is wrong, or the hub refuses the upload.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils._validators import validate_repo_id

    folder = model_folder(run, best=best, step=step, adapter=adapter)
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"{repo!r}: {first_line(error)}") from None
    if "/" not in repo:
        raise ConfigError(f"{repo!r} names no owner; write OWNER/NAME")
    if not (folder / CARD).is_file():
        sys.stderr.write(f"note: {folder} has no {CARD}: its learner wrote none, see the learner's log\n")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    size = sum((folder / path).stat().st_size for path in files)
    sys.stdout.write(f"uploading {len(files)} files ({size / 1e6:.1f} MB) of {folder} to {repo}\n")
    client = HfApi(library_name="offbeat")
    try:
        client.create_repo(repo, private=not public, exist_ok=True, repo_type="model")
        done = client.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=f"Upload {run.name}, {folder.name}",
            repo_type="model",
        )
    except LocalTokenNotFoundError as error:
        raise ConfigError(f"{first_line(error)}; set HF_TOKEN, or run `hf auth login`") from None
    except Exception as error:
        # The client's own errors, and those of the libraries below it.
        raise ConfigError(
            f"{repo}: the upload failed: {first_line(error)}; is HF_TOKEN one that may write there?"
        ) from None
    sys.stdout.write(f"{done.commit_url}\n")
    return 0


def model_folder(run: Path, *, best: bool, step: int | None, adapter: bool) -> Path:
    """Return the folder of a run's model.

    Raises:
        ConfigError: there is none; the message names those that there are.
    """
    if not run.is_dir():
        raise ConfigError(f"{str(run)!r} is not a run folder; write for example runs/NAME")
    there = exported(run)
    if step is not None:
        folder = step_model(run, step)
    elif best:
        summary, kept = read_summary(run), [path for path in there if path.name.startswith(BEST)]
        found = (summary or {}).get("best")
        if found is not None:
            folder = best_model(run, found["step"])
            # The last model is the best one, or a step's model was not kept.
            if folder not in there and Path(found["model"] or "").name == "model":
                folder = run / "model"
        elif summary is None and kept:
            # The run goes on, and a newer one is kept because it is better.
            folder = kept[-1]
        else:
            raise ConfigError(
                f"{run} has no best model: it has not ended, or had no evaluation behind its first step"
            )
    else:
        folder = run / "model"
    if folder not in there:
        names = ", ".join(str(path.relative_to(run)) for path in there) or "none"
        raise ConfigError(f"{run} has no {folder.relative_to(run)}; models there: {names}")
    if not adapter:
        return folder
    if not (folder / ADAPTER_FOLDER).is_dir():
        raise ConfigError(f"{folder} has no adapters: the run trained all weights; leave out --adapter")
    return folder / ADAPTER_FOLDER


def first_line(error: BaseException) -> str:
    """Return the beginning of an error's text, in one line."""
    return " ".join(str(error).split())[:SHOWN_CHARS]
