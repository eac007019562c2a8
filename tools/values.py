"""Write every measure's value as hexadecimal floats, or compare two such files bit by bit.

    python tools/values.py write before.json
    ...change the code...
    python tools/values.py write after.json
    python tools/values.py compare before.json after.json

What is measured: every measure, as the model is written and at its balanced form, on every case
of ``tests/cases.py``; and every measure on the published checkpoints of ``tests/zoo.py``, where
their files are there. Everything that could change the last bits is fixed: one thread, one chunk,
one memory budget, one seed. Files of different machines or torch builds are not comparable.

`compare` lists what moved. Exact values must agree to the bit; estimates must agree within five
times their common error; the exit code is 1 if any does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
import traceback
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from cases import LAYER_CASES, build  # noqa: E402
from zoo import CHECKPOINTS, ZOO, images, trained  # noqa: E402

import flatgauge as fg  # noqa: E402
from flatgauge.measures import registry  # noqa: E402

#: Searches cut short: equal bits do not need a converged search.
SHORT = {"normalized_sharpness_direct": {"steps": 8, "pairs": 4}}
#: Samples of a checkpoint, and what would take minutes on each.
SAMPLES = 24
SLOW = ("psi_*", "basis_path_ratio", "normalized_sharpness_direct", "minimum_sharpness")
BALANCED = "balanced:"


def main() -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="measure everything and write a file")
    write.add_argument("file", type=Path)
    write.add_argument("--only", default="*", help="glob pattern of cases and checkpoints")
    write.add_argument("--kind", choices=("cases", "checkpoints"), help="one of the two alone")
    compare = commands.add_parser("compare", help="list what differs between two files")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        write_values(given.file, given.only, given.kind)
        return 0
    return compare_files(given.before, given.after)


def write_values(file: Path, only: str, kind: str | None) -> None:
    """Measure all that matches, and write the file after every network."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    names = [*LAYER_CASES, *(name for name in ZOO if (CHECKPOINTS / ZOO[name].file).exists())]
    for name in names:
        if not fnmatch(name, only) or kind == ("checkpoints" if name in LAYER_CASES else "cases"):
            continue
        start = time.perf_counter()
        if name in LAYER_CASES:
            case = build(name)
            surface = fg.LossSurface(
                case.model, case.loss, (case.inputs, case.targets), memory="4GiB", chunk=64
            )
            measures = [*(m.name for m in registry), *(BALANCED + m.name for m in registry)]
        else:
            samples = images(name, SAMPLES, split="train")
            surface = fg.LossSurface(
                trained(name), "cross_entropy", tuple(samples), memory="4GiB", chunk=64
            )
            measures = [m.name for m in registry if not any(fnmatch(m.name, slow) for slow in SLOW)]
        for measure in measures:
            found[f"{name} / {measure}"] = measure_one(surface, measure)
        file.write_text(json.dumps(found, indent=1))
        sys.stderr.write(f"{name}: {time.perf_counter() - start:.0f} s\n")


def measure_one(surface: fg.LossSurface, name: str) -> dict[str, Any]:
    """One measure by itself: its numbers in hexadecimal, or why there are none."""
    options = SHORT.get(name.removeprefix(BALANCED), {})
    try:
        estimate = fg.measure(surface, measures={name: options})[name]
    except Exception as error:  # An error is a result like any other here.
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-400:]}
    units = hashlib.sha256()
    for key in sorted(estimate.units):
        units.update(key.encode() + estimate.units[key].detach().contiguous().numpy().tobytes())
    return {
        "value": to_hex(estimate.value),
        "stderr": to_hex(estimate.stderr),
        "data_stderr": to_hex(estimate.data_stderr),
        "bound": to_hex(estimate.bound),
        "exact": estimate.exact,
        "converged": estimate.converged,
        "matvecs": estimate.matvecs,
        "layers": {key: to_hex(value) for key, value in estimate.layers.items()},
        "details": {key: to_hex(value) for key, value in estimate.details.items()},
        "units": units.hexdigest(),
        "notes": list(estimate.notes),
    }


def to_hex(value: float | None) -> str | None:
    """A number without loss."""
    return None if value is None else float(value).hex()


def compare_files(before: Path, after: Path) -> int:
    """Print what differs; 1 if anything exact moved, or an estimate beyond its error."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    wrong = moved = 0
    for key in old.keys() | new.keys():
        if key not in old or key not in new:
            sys.stdout.write(f"only in one file: {key}\n")
    for key in sorted(old.keys() & new.keys()):
        a, b = old[key], new[key]
        if "error" in a or "error" in b:
            if ("error" in a) != ("error" in b):
                wrong += 1
                sys.stdout.write(f"ERROR  {key}: {a.get('error')} -> {b.get('error')}\n")
            continue
        fields = [field for field in a if a[field] != b[field]]
        if not fields:
            continue
        moved += 1
        x, y = float.fromhex(a["value"]), float.fromhex(b["value"])
        scale = max(abs(x), abs(y)) or 1.0
        allowed = 5 * sum(
            float.fromhex(e[f]) for e in (a, b) for f in ("stderr", "bound") if e[f] is not None
        )
        bad = a["exact"] and b["exact"] and x != y
        bad |= not (x == y or abs(x - y) <= allowed or (math.isnan(x) and math.isnan(y)))
        wrong += bad
        change = "" if x == y else f" {x:.6g} -> {y:.6g} ({abs(x - y) / scale:.1e})"
        sys.stdout.write(f"{'MOVED ' if bad else 'moved '} {key}: {', '.join(fields)}{change}\n")
    sys.stdout.write(
        f"{len(old)} values, {moved} with any difference, {wrong} beyond their error\n"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
