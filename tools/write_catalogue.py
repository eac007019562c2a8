"""Write the overview of measures that `flatgauge catalogue` prints without loading torch.

    python tools/write_catalogue.py

Run after a measure was added or its symbol, definition, invariances or cost were changed;
`tests/cli/test_cli.py` compares the file with the registry.
"""

from __future__ import annotations

import json

from flatgauge.cli.catalogue import ROWS
from flatgauge.report.catalogue import catalogue_rows

if __name__ == "__main__":
    text = json.dumps(catalogue_rows(), indent=1, ensure_ascii=False)
    ROWS.write_text(text + "\n", encoding="utf-8")
