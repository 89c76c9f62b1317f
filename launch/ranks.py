"""Entry point of the learner's ranks on one host, by hand: ``python -m launch.ranks RUN_FOLDER ARGUMENTS_OF_TORCHRUN``.

torchrun ends with code 1 whatever its ranks ended with, and a rank that loses its connection does not know why. This
program is torchrun, and ends with the code of the error that ended the learner on any of its hosts.
"""

import sys
from pathlib import Path

from launch import exit_codes

ROLE = "learner"
"""Name under which all ranks leave their notes."""


def main() -> None:
    """Run torchrun. Exit with `exit_codes.FINAL` if the learner ended with an error that another start would repeat."""
    from torch.distributed.run import main as torchrun

    folder = Path(sys.argv[1])
    try:
        torchrun(sys.argv[2:])
    except Exception:
        # The first host removes an earlier note before its ranks start, so this one is of the present learner.
        if exit_codes.read_note(folder, ROLE) != exit_codes.FINAL:
            raise
        sys.stderr.write(f"{ROLE}: it ended for good: {exit_codes.read_reason(folder, ROLE)}\n")
        sys.exit(exit_codes.FINAL)


if __name__ == "__main__":
    main()
