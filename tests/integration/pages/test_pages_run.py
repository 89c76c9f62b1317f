"""Every block of code of the pages for users runs as it stands, in the order of its page, in an empty folder."""

import json
import re
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import launch.preflight.engine_trial
from tests import bubblewrap
from tests.pages import CODE, ROOT, PageRun, blocks

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if any(block.language in CODE for block in blocks(page))]


def model_of_pages(folder: Path) -> Path:
    """Make a model folder that `offbeat check` takes for the model of the pages, with the template of Qwen3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 32_768}))
    template = (ROOT / "tests" / "chat_templates" / "qwen3.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def page_run(tmp_path, monkeypatch):
    """Return a run through a page in an empty folder, with a model where a page names one of the hub."""
    model = model_of_pages(tmp_path / "model")
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folder)
    # The model of the pages has no weights here; tests/integration/launch/test_engine_trial.py has the trial.
    monkeypatch.setattr(launch.preflight.engine_trial, "try_engine", lambda config, folder: [])
    before = set(sys.modules)
    run = PageRun(folder, (f"model.path={model}",))
    yield run
    run.close()
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if path.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_run(page, page_run):
    if page.name == "code-rewards.md" and (missing := bubblewrap.reason()):
        pytest.skip(missing)
    for block in blocks(page):
        if block.language not in CODE and not block.file:
            continue
        if block.reason:
            print(f"{block.page}:{block.line}: not run: {block.reason}")
            continue
        try:
            page_run.run(block)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{block.page}:{block.line}: {type(error).__name__}: {error}") from error


def test_a_reason_is_a_sentence_and_names_tests_that_exist():
    reasons = [block.reason for page in WITH_CODE for block in blocks(page) if block.reason]
    assert all(len(reason.split()) > 3 for reason in reasons)
    named = {name for reason in reasons for name in re.findall(r"(?:tests|benchmarks)/[\w/.]*\w", reason)}
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_a_block_that_cannot_be_read_is_found(page_run, tmp_path):
    """The runner itself: a line that no interpreter takes, a setting that is not there, a command that fails."""
    page = tmp_path / "page.md"
    for text in ("```python\nf(lambda x: x,),)\n```", '```toml\n[run]\nnmae = "x"\n```', "```sh\nfalse\n```"):
        page.write_text(text)
        (block,) = blocks(page)
        with pytest.raises(Exception, match=r"invalid syntax|unmatched|nmae|false"):
            page_run.run(block)
