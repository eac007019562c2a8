"""Check a wheel: nothing but the package is in it, and it runs where nothing else of it is.

    python .ci/check_wheel.py dist/flatgauge-*.whl

It is installed into a fresh environment that sees the libraries of the one this script runs in,
so that nothing large is fetched, but not the project itself.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parent.parent

NET = "import torch\n\n\ndef net():\n    return torch.nn.Sequential(\n"
NET += "        torch.nn.Flatten(), torch.nn.Linear(64, 10)\n    )\n"


def check_contents(wheel: Path) -> str:
    """Compare the files of a wheel to those of the source that are under version control.

    Args:
        wheel: The wheel.

    Returns:
        Its version.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(about).decode())
    packed = {name for name in names if ".dist-info/" not in name}
    command = ["git", "ls-files", "--", "src"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    source = {line.removeprefix("src/") for line in listed.splitlines()}
    wrong = {"only in the wheel": packed - source, "missing in the wheel": source - packed}
    for what, files in wrong.items():
        if files:
            sys.exit(f"{wheel.name}: {what}: {', '.join(sorted(files))}")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if metadata["Description-Content-Type"] != "text/markdown":
        sys.exit(f"{wheel.name}: the README is {metadata['Description-Content-Type']}")
    if str(metadata.get_payload()).strip() != readme.strip():
        sys.exit(f"{wheel.name}: its description is not the README")
    return str(metadata["Version"])


def check_installed(wheel: Path, version: str) -> None:
    """Install a wheel into a fresh environment, and use it.

    Args:
        wheel: The wheel.
        version: What it should call itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "env", with_pip=False)
        python = place / "env" / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
        subprocess.run([*pip, "install", "-q", "--no-deps", str(wheel)], check=True)
        # Libraries of the other environment; a project that is installed there by reference is
        # not found this way.
        paths = {"base": str(place / "env"), "platbase": str(place / "env")}
        own = sysconfig.get_path("purelib", vars=paths)
        Path(own, "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (place / "net.py").write_text(NET)

        def run(*words: str) -> str:
            command = [str(place / "env" / "bin" / "flatgauge"), *words]
            return subprocess.run(
                command, cwd=place, check=True, stdout=subprocess.PIPE, text=True
            ).stdout

        script = "import flatgauge; print(flatgauge.__file__)"
        found = subprocess.run(
            [str(python), "-c", script], cwd=place, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        if not found.startswith(str(place)):
            sys.exit(f"the wheel was not used, but {found}")
        if run("--version").strip() != version:
            sys.exit(f"`flatgauge --version` is not {version}")
        without = [f"--without={part}" for part in ("certificate", "spectrum", "landscape")]
        words = ("net.py:net", "--data", "digits", "-m", "rho_sum", "--html", "page.html")
        run("measure", *words, *without)
        if "rho_sum" not in (place / "page.html").read_text(encoding="utf-8"):
            sys.exit("the page does not show what was measured")


def main() -> None:
    """Check the wheel that is named on the command line."""
    wheel = Path(sys.argv[1]).resolve()
    version = check_contents(wheel)
    check_installed(wheel, version)
    sys.stdout.write(f"{wheel.name}: its files are those of the source; installed and run\n")


if __name__ == "__main__":
    main()
