"""Write the generated pages: ``python -m launch.reference docs``."""

import sys
from pathlib import Path

from launch.reference.configuration import configuration_page
from launch.reference.metrics import fill_tables

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "run" / "configuration.md").write_text(configuration_page(), encoding="utf-8")
    metrics = folder / "run" / "metrics.md"
    metrics.write_text(fill_tables(metrics.read_text(encoding="utf-8")), encoding="utf-8")
