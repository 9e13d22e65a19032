"""`fedsieve doctor`: what is here and what is missing, with the command that brings it."""

import json as json_text
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import fedsieve
from fedsieve.cli.data import DATASET_FILES, availability
from fedsieve.cli.options import Switch
from fedsieve.data.downloads import default_folder

REQUIRED_PACKAGES = ("numpy", "scipy", "scikit-learn", "safetensors", "jaxtyping", "cyclopts", "rich", "matplotlib")
OPTIONAL_PACKAGES = {
    "numba": ("fast", "faster runs of models with a thousand weights or more"),
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
    """One line."""

    group: str
    name: str
    state: str
    detail: str


def doctor(*, json: Switch = False) -> int:
    """What is here: versions, threads, data, browser, optional packages. Exit code 1 if something needed is missing.

    Parameters
    ----------
    json
        all findings as one JSON list
    """
    found = [*check_machine(), *check_packages(), *check_data(), check_browser(), check_writable()]
    if json:
        print(json_text.dumps([finding._asdict() for finding in found]))
    else:
        print_findings(found)
    return 1 if any(finding.state == WRONG for finding in found) else 0


def check_machine() -> list[Finding]:
    """This package, Python, the processor."""
    threads = os.environ.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        Finding("machine", "fedsieve", GOOD, f"{fedsieve.__version__} in {Path(fedsieve.__file__).parent}"),
        Finding("machine", "python", GOOD, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding(
            "machine", "cores", GOOD, f"{cores}; a run uses --threads, 1 by default" + (f"; OMP_NUM_THREADS={threads}" if threads else "")
        ),
        check_torch(),
    ]


def check_torch() -> Finding:
    """Whether torch can add."""
    try:
        import torch

        assert torch.ones(2).sum() == 2
        devices = ", ".join(
            ["cpu", *(["cuda"] if torch.cuda.is_available() else []), *(["mps"] if torch.backends.mps.is_available() else [])]
        )
    except Exception as problem:  # whatever is wrong with it is what the user came to learn
        return Finding("machine", "torch", WRONG, f"{type(problem).__name__}: {problem}; pip install torch")
    return Finding("machine", "torch", GOOD, f"{torch.__version__}; devices: {devices}")


def check_packages() -> list[Finding]:
    """The needed ones, then the optional ones."""
    lines = []
    for name in (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES):
        try:
            lines.append(Finding("packages", name, GOOD, version(name)))
        except PackageNotFoundError:
            if name in REQUIRED_PACKAGES:
                lines.append(Finding("packages", name, WRONG, f"missing; pip install {name}"))
            else:
                extra, what = OPTIONAL_PACKAGES[name]
                lines.append(Finding("packages", name, MISSING, f"for {what}: pip install 'fedsieve[{extra}]'"))
    return lines


def check_data() -> list[Finding]:
    """Which data sets are found."""
    found = {task: availability(task, None) for task in DATASET_FILES}
    where = Finding("data", "folder", GOOD, f"{default_folder()}; FEDSIEVE_DATA names another")
    return [where, *(Finding("data", task, MISSING if said.startswith("missing") else GOOD, said) for task, said in found.items())]


def check_browser() -> Finding:
    """Who would show a report."""
    name = next((name for name in BROWSERS if shutil.which(name)), None)
    if name is None and sys.platform != "win32":
        return Finding("pages", "browser", MISSING, "none found; reports are files, open them where there is one")
    return Finding("pages", "browser", GOOD, name or "the system's")


def check_writable() -> Finding:
    """Whether runs can be left here."""
    here = os.access(Path.cwd(), os.W_OK)
    return Finding("pages", "runs/", GOOD if here else WRONG, "can be written here" if here else "cannot be written here; use --out")


def print_findings(findings: list[Finding]) -> None:
    """Findings for people, grouped."""
    table = Table(show_header=False, title="fedsieve doctor", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for i, finding in enumerate(findings):
        if i and finding.group != findings[i - 1].group:
            table.add_section()
        style = {GOOD: "green", MISSING: "dim", WRONG: "bold red"}[finding.state]
        table.add_row(finding.name, finding.state, finding.detail, style=style if finding.state != GOOD else None)
    Console(highlight=False).print(table)
