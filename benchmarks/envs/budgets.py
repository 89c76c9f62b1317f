"""A toy task with a limit: more is better up to it, and everything is lost beyond it."""

from benchmarks.envs.letters import TARGET, PromptedSuite


class BudgetSuite(PromptedSuite):
    """Each `TARGET` in a response pays, up to a limit. A response with more of them pays nothing.

    So an answer that grows beyond its limit of tokens is cut off and fails: a step that was right under an old policy
    may be wrong under the present one.

    Args:
        length: characters of a full response.
        limit: most characters that may be `TARGET`.
        prompts: number of different prompts.
    """

    def __init__(self, length: int = 8, limit: int = 6, prompts: int = 4) -> None:
        super().__init__(length, prompts, lambda text: within(text[:length], limit))


def within(text: str, limit: int) -> float:
    """Return how many characters are `TARGET`, over the limit; 0 if they are more.

    Example:
        >>> [within(text, 2) for text in ("xxxx", "exxx", "eexx", "eeex")]
        [0.0, 0.5, 1.0, 0.0]
    """
    found = text.count(TARGET)
    return found / limit if found <= limit else 0.0
