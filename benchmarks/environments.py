"""Virtual environments of the rivals, created below `.bench/` on first use. A rival that cannot be installed is reported as missing."""

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
    """A rival cannot be run; the message says why."""


def find_interpreter(contender: str) -> Path:
    """Return the Python interpreter with the packages of a contender."""
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
    constraints = ENVIRONMENTS_DIR / "constraints.txt"  # rivals may need other versions of all other packages
    constraints.write_text("".join(line for line in (ROOT / "constraints.txt").open() if line.split("==")[0] in PINNED_PACKAGES))
    pip = [str(environment_dir / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(constraints), *packages]
    for command in ([sys.executable, "-m", "venv", str(environment_dir)], pip):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            output = (getattr(error, "stderr", "") or str(error)).strip()
            raise UnavailableError(f"cannot be installed: {output.splitlines()[-1] if output else type(error).__name__}") from None
