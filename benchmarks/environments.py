"""Rivals in environments of their own, made on first use below `.bench/`; one that cannot be installed is missing, never an error."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS_DIR = ROOT / ".bench"
PACKAGES = {
    "flower": ["torch", "psutil", "flwr[simulation]>=1.40,<2"],
    "pfl": ["torch", "pfl"],
    "fedjax": ["fedjax", "jax", "jaxlib"],
}
PINNED_PACKAGES = ("torch", "flwr", "ray")
INSTALL_SECONDS = 1800


class UnavailableError(RuntimeError):
    """A rival that cannot take part; the message says why."""


def find_interpreter(contender: str) -> Path:
    """The Python that has what the contender needs."""
    if contender not in PACKAGES:
        return Path(sys.executable)
    home = ENVIRONMENTS_DIR / contender
    stamp = home / "installed"
    wanted = "\n".join(PACKAGES[contender])
    if not stamp.exists() or stamp.read_text() != wanted:
        _install(home, PACKAGES[contender])
        stamp.write_text(wanted)
    return home / "bin" / "python"


def _install(environment_dir: Path, packages: list[str]) -> None:
    print(f"installing {environment_dir.name} into {environment_dir.relative_to(ROOT)}", file=sys.stderr)
    held = ENVIRONMENTS_DIR / "constraints.txt"  # only what must not vary: the rest of ours may not suit a rival
    held.write_text("".join(line for line in (ROOT / "constraints.txt").open() if line.split("==")[0] in PINNED_PACKAGES))
    pip = [str(environment_dir / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(held), *packages]
    for command in ([sys.executable, "-m", "venv", str(environment_dir)], pip):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except (subprocess.SubprocessError, OSError) as problem:
            told = (getattr(problem, "stderr", "") or str(problem)).strip()
            raise UnavailableError(f"cannot be installed: {told.splitlines()[-1] if told else type(problem).__name__}") from None
