"""Rivals in environments of their own, made on first use below `.bench/`; one that cannot be installed is missing, never an error."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".bench"
PACKAGES = {
    "flower": ["torch", "psutil", "flwr[simulation]>=1.40,<2"],
    "pfl": ["torch", "pfl"],
    "fedjax": ["fedjax", "jax", "jaxlib"],
}
HELD = ("torch", "flwr", "ray")
INSTALL_SECONDS = 1800


class MissingError(RuntimeError):
    """A rival that cannot take part; the message says why."""


def interpreter(contender: str) -> Path:
    """The Python that has what the contender needs."""
    if contender not in PACKAGES:
        return Path(sys.executable)
    home = HOME / contender
    stamp = home / "installed"
    wanted = "\n".join(PACKAGES[contender])
    if not stamp.exists() or stamp.read_text() != wanted:
        _install(home, PACKAGES[contender])
        stamp.write_text(wanted)
    return home / "bin" / "python"


def _install(home: Path, packages: list[str]) -> None:
    print(f"installing {home.name} into {home.relative_to(ROOT)}", file=sys.stderr)
    held = HOME / "constraints.txt"  # only what must not vary: the rest of ours may not suit a rival
    held.write_text("".join(line for line in (ROOT / "constraints.txt").open() if line.split("==")[0] in HELD))
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(held), *packages]
    for command in ([sys.executable, "-m", "venv", str(home)], pip):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except (subprocess.SubprocessError, OSError) as problem:
            told = (getattr(problem, "stderr", "") or str(problem)).strip()
            raise MissingError(f"cannot be installed: {told.splitlines()[-1] if told else type(problem).__name__}") from None
