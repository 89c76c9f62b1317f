"""Makes the part of a learner that keeps families."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from learner.config import LearnerConfig
from learner.errors import ModelUnusable
from learner.families.answer_config import JudgeFamily
from learner.families.drafts import AnswerText
from learner.families.waiting import WaitingFamilies
from learner.intake.curriculum import Curriculum


def waiting_families(
    config: LearnerConfig, curriculum: Curriculum, model: str, *, seed: int
) -> WaitingFamilies | None:
    """Return the families of a run; None if groups are trained by themselves.

    Args:
        config: settings of the learner.
        curriculum: the one that deals out the groups.
        model: model folder, whose tokenizer turns answers into text.
        seed: seed of the run.

    Raises:
        ModelUnusable: the tokenizer cannot be read.
    """
    if config.family is None:
        return None
    return WaitingFamilies(config.family, curriculum, open_decoder(model), seed)


def decoder_of_judgements(config: LearnerConfig, model: str) -> AnswerText | None:
    """Return what reads the judgements of a recorded run; None if its families have none.

    Raises:
        ModelUnusable: the tokenizer cannot be read.
    """
    return open_decoder(model) if isinstance(config.family, JudgeFamily) else None


def open_decoder(model: str) -> AnswerText:
    """Return a function that turns the tokens of an answer into text, without special tokens.

    Raises:
        ModelUnusable: the tokenizer cannot be read.
    """
    path = Path(model) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The tokenizers library raises bare Exception.
        raise ModelUnusable(
            f"[learner.family] needs the tokenizer of the model, and {path} cannot be read: {error}"
        ) from None

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    return decode
