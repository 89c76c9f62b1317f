"""An environment of `verifiers`: a task with a tool server and a reward of its own. Nothing in it knows of Offbeat.

Run as a program, it is the tool server, which `verifiers` starts.
"""

import verifiers.v1 as vf


class SumTools(vf.Toolset[vf.ToolsetConfig, vf.State]):  # type: ignore[misc]
    """One tool."""

    TOOL_PREFIX = None

    @vf.tool  # type: ignore[untyped-decorator]
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """A sum whose value is 19."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [SumTools(vf.ToolsetConfig())]

    @vf.reward  # type: ignore[untyped-decorator]
    async def exact(self, trace: vf.Trace) -> float:
        return float("19" in (trace.last_reply or ""))


if __name__ == "__main__":
    SumTools.run()
