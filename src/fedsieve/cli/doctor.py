"""The command `fedsieve doctor`: what is installed, what is missing, and the command that installs it."""

import json as json_text
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

import fedsieve
from fedsieve.cli.data import DATASET_FILES, availability
from fedsieve.cli.options import Switch
from fedsieve.data.downloads import default_folder
from fedsieve.formatting import PlainConsole
from fedsieve.runtime.cores import count_cores

REQUIRED_PACKAGES = ("numpy", "scipy", "scikit-learn", "safetensors", "jaxtyping", "cyclopts", "rich", "matplotlib")
OPTIONAL_PACKAGES = {
    "numba": ("fast", "faster training of models with 1,000 or more weights"),
    "onnx": ("onnx", "export --format onnx"),
    "onnxruntime": ("onnx", "export --verify, predict"),
    "onnxscript": ("onnx", "export of modules"),
    "tensorboard": ("track", "--tracker tensorboard"),
    "trackio": ("track", "--tracker trackio"),
    "flwr": ("flower", "deployment"),
    "dp-accounting": ("privacy", "--privacy.noise-multiplier"),
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox", "xdg-open", "open")
GOOD, MISSING, WRONG = "ok", "-", "WRONG"


class Finding(NamedTuple):
    """One line of the output."""

    group: str
    name: str
    state: str
    detail: str


def doctor(*, json: Switch = False) -> int:
    """Check versions, cores, data, browser and optional packages. The exit code is 1 if a required one is missing.

    Parameters
    ----------
    json
        print all findings as one JSON list
    """
    findings = [*check_machine(), *check_packages(), *check_data(), check_browser(), check_writable()]
    if json:
        print(json_text.dumps([finding._asdict() for finding in findings]))
    else:
        print_findings(findings)
    return 1 if any(finding.state == WRONG for finding in findings) else 0


def check_machine() -> list[Finding]:
    """Check this package, Python, the processor and torch."""
    return [
        Finding("machine", "fedsieve", GOOD, f"{fedsieve.__version__} in {Path(fedsieve.__file__).parent}"),
        Finding("machine", "python", GOOD, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("machine", "cores", GOOD, f"{count_cores()}; large rounds use all of them unless --workers is set"),
        check_torch(),
    ]


def check_torch() -> Finding:
    """Check that torch computes, and list its devices."""
    try:
        import torch

        assert torch.ones(2).sum() == 2
        devices = ", ".join(
            ["cpu", *(["cuda"] if torch.cuda.is_available() else []), *(["mps"] if torch.backends.mps.is_available() else [])]
        )
    except Exception as error:  # a broken installation may raise anything
        return Finding("machine", "torch", WRONG, f"{type(error).__name__}: {error}; pip install torch")
    return Finding("machine", "torch", GOOD, f"{torch.__version__}; devices: {devices}")


def check_packages() -> list[Finding]:
    """Check the required and the optional packages."""
    findings = []
    for name in (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES):
        try:
            findings.append(Finding("packages", name, GOOD, version(name)))
        except PackageNotFoundError:
            if name in REQUIRED_PACKAGES:
                findings.append(Finding("packages", name, WRONG, f"missing; pip install {name}"))
            else:
                extra, purpose = OPTIONAL_PACKAGES[name]
                findings.append(Finding("packages", name, MISSING, f"for {purpose}: pip install 'fedsieve[{extra}]'"))
    return findings


def check_data() -> list[Finding]:
    """Check which data sets are present."""
    folder = Finding("data", "folder", GOOD, f"{default_folder()}; set FEDSIEVE_DATA to use another")
    states = {task: availability(task, None) for task in DATASET_FILES}
    return [folder, *(Finding("data", task, MISSING if text.startswith("missing") else GOOD, text) for task, text in states.items())]


def check_browser() -> Finding:
    """Check for a browser to open reports."""
    name = next((name for name in BROWSERS if shutil.which(name)), None)
    if name is None and sys.platform != "win32":
        return Finding("pages", "browser", MISSING, "none found; copy reports, which are files, to a machine with a browser")
    return Finding("pages", "browser", GOOD, name or "default of the system")


def check_writable() -> Finding:
    """Check that runs can be written to the current folder."""
    is_writable = os.access(Path.cwd(), os.W_OK)
    detail = "can be written here" if is_writable else "cannot be written here; use --out"
    return Finding("pages", "runs/", GOOD if is_writable else WRONG, detail)


def print_findings(findings: list[Finding]) -> None:
    """Print the findings as a table, grouped."""
    table = Table(show_header=False, title="fedsieve doctor", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for i, finding in enumerate(findings):
        if i and finding.group != findings[i - 1].group:
            table.add_section()
        style = {GOOD: "green", MISSING: "dim", WRONG: "bold red"}[finding.state]
        table.add_row(finding.name, finding.state, finding.detail, style=style if finding.state != GOOD else None)
    PlainConsole().print(table)
