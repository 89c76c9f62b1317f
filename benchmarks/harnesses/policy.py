"""A policy that plays its part from the text of its prompt alone, and changes its version within each answer."""

from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np

from actors.generator_client import TurnRequest
from actors.sampled import FinishReason, Sampled

CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
THOUGHT = "<think>\nLet me see – café.\n</think>\n\n"
ODD = '{"b":7,  "a": 12}'
"""Arguments that most harnesses spell in another way when they send them back."""
SHELLS = {
    "exec_command": '{"yield_time_ms":9000,  "cmd": "echo $((12 + 7))"}',
    "bash": '{"description":"Adds.",  "command": "echo $((12 + 7))"}',
}
"""Tools that run a command, and odd arguments of each."""
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Word with which a command ends mini-swe-agent."""


def answer_to(prompt: str) -> str:
    """Return what the policy says to a prompt: one call, then two at a time, then a text.

    Example:
        >>> answer_to("<tools>add</tools> 12 + 7? <tool_response>19</tool_response>").count("<tool_call>")
        2
    """
    talk = prompt.rpartition("<|im_start|>system\n")[2]
    if "final_answer" in talk:
        return _smolagents(talk)
    behind = talk.rpartition("<|im_start|>user\n12 + 7?")[2]
    results = behind.count("<tool_response>")
    if "ask_worker" in talk:
        asked = ['{"input": "12 + 7?"}'], ['{"input": "12 + 7? Now."}', '{"input": "12 + 7? Again."}']
        return "19" if results >= 3 else THOUGHT + _calls("ask_worker", asked[min(results, 1)])
    if results >= 3 and SUBMIT in talk:
        return _calls("bash", [f'{{"command": "echo {SUBMIT} && echo 19"}}'])
    if results >= 3:
        return "  The sum – 19.\n\n"
    tools, _, _ = prompt.rpartition("</tools>")
    if not tools:
        return "A sum."
    for shell, arguments in SHELLS.items():
        if f'"name": "{shell}"' in tools:
            return THOUGHT + _calls(shell, [arguments] * min(results + 1, 2))
    return THOUGHT + _calls("add", [ODD] if not results else [ODD, '{"a": 1, "b": 1}'])


def _smolagents(talk: str) -> str:
    behind = talk.rpartition("12 + 7?")[2]
    seen = behind.count("Observation:")
    if "<tools>" in talk:
        if seen >= 2:
            return _calls("final_answer", ['{"answer": "19"}'])
        return _calls("add", [ODD] if not seen else [ODD, '{"a": 1, "b": 1}'])
    code = "final_answer(19)" if seen >= 3 else f"print(add(12, {7 + seen}))"
    return f"Thought: I add.\n<code>\n{code}\n</code>"


def _calls(name: str, arguments: Sequence[str]) -> str:
    return "\n".join(CALL.format(name=name, arguments=one) for one in arguments)


class ScriptedPolicy:
    """Samples the answers of `answer_to`, each in two pieces of different versions.

    Args:
        encode: text to token ids.
        decode: token ids to text.
    """

    def __init__(self, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str]) -> None:
        self._encode, self._decode = encode, decode
        self.prompts: list[list[int]] = []
        """Prompt of each turn."""
        self.sampled: list[list[int]] = []
        """Tokens of each turn."""
        self.versions: list[list[int]] = []
        """Version of each of these tokens."""

    async def turn(self, request: TurnRequest) -> AsyncGenerator[Sampled, None]:
        """Answer one request, as a pool of generators does."""
        ids = self._encode(answer_to(self._decode(request.prompt)) + "<|im_end|>")
        first, version = len(ids) // 2, 2 * len(self.prompts)
        versions = [version] * first + [version + 1] * (len(ids) - first)
        self.prompts.append(list(request.prompt))
        self.sampled.append(ids)
        self.versions.append(versions)
        parts: list[tuple[int, int, FinishReason]] = [(0, first, ""), (first, len(ids), "stop")]
        for begin, end, reason in parts:
            part = np.array(ids[begin:end], "i4")
            logps = np.full(len(part), -1.0, "f4")
            yield Sampled(part, logps, np.array(versions[begin:end], "i4"), reason)
