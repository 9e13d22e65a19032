"""`fedsieve flower`: a complete Flower app from a template, and a federation on this machine for the time of one run of it."""

import json as json_text
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from fedsieve.cli.options import Integer, Switch
from fedsieve.deployment.local_cluster import FLOWER_COMMANDS, LocalCluster, LocalClusterError, find_executable
from fedsieve.formatting import ProgressBar, format_bytes, format_number, format_seconds
from fedsieve.storage import run_directory

TEMPLATE = Path(__file__).parents[1] / "deployment" / "template"
PLACEHOLDER = "APP-NAME"
COMPLETED_STATUS = "finished:completed"
SIGNAL_EXIT_BASE = 128
"""What a shell adds to the number of a signal."""
POLL_SECONDS = 0.5
"""Seconds between two looks at what the server wrote."""
SHOWN_METRICS = ("accuracy", "r2", "micro_f1")
PAIR_PATTERN = re.compile(r"""([\w.-]+)=("[^"]*"|'[^']*'|[^\s"']+)""")
Pairs = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]


def flower_app() -> App:
    """The two commands."""
    app = App(name="flower", help="A Flower app of your own, and a federation to run it in.", result_action="return_value")
    app.command(new)
    app.command(run)
    return app


def new(folder: Path) -> int:
    """Write a complete Flower app that runs in simulation and in deployment, with a place for your own rows and module.

    Parameters
    ----------
    folder
        where to; it must not hold anything yet
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise run_directory.RunDirectoryError(f"{folder} is not an empty folder; choose another, nothing is overwritten")
    name = re.sub("[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:32] or "app"
    try:
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder / "pyproject.toml", folder / "README.md"):
            path.write_text(path.read_text().replace(PLACEHOLDER, name))
    except OSError as problem:
        raise run_directory.RunDirectoryError(f"cannot write an app into {folder}: {problem.strerror}") from None
    print(f"wrote a Flower app into {folder}; your own rows and module go into")
    print(f"  {folder / 'app' / 'task.py'}")
    print("run it as it is, three nodes on this machine, with")
    print(f"  fedsieve flower run {folder}")
    return 0


def run(
    folder: Path,
    *,
    nodes: Integer | None = None,
    simulation: Switch = False,
    run_config: Pairs = (),
    out: Path | None = None,
    resume: Path | None = None,
    quiet: Switch = False,
    json: Switch = False,
) -> int:
    """Run a Flower app on this machine: a superlink and its nodes on loopback, for the time of the run.

    Parameters
    ----------
    folder
        the app
    nodes
        how many; one for each client (default: the app's own setting clients)
    simulation
        let Flower simulate the nodes with Ray instead of starting a process for each
    run_config
        'KEY=VALUE KEY=VALUE': settings of the app to change for this run; may be given several times
    out
        folder of the run (default: runs/NAME, after the app)
    resume
        folder of a run of this app that was cut off: it goes on from its last checkpoint
    quiet
        no progress and no table
    json
        the result as one JSON object on the last line
    """
    app = read_app(folder)
    settings = merge_settings(app["tool"]["flwr"]["app"].get("config", {}), run_config)
    clients = num_nodes(settings, parse_pairs(run_config), nodes)
    for command in FLOWER_COMMANDS:
        find_executable(command)
    if simulation and find_spec("ray") is None:
        raise LocalClusterError("Flower's simulation needs Ray; install it with: pip install 'fedsieve[flower]'")
    place = choose_run_directory(str(app["project"]["name"]), out, resume)
    overrides = {**parse_pairs(run_config), "clients": clients, "run-dir": str(place.resolve())}
    for ending in (signal.SIGTERM, signal.SIGHUP):  # so that what was started is stopped then, too
        signal.signal(ending, lambda received, _: sys.exit(SIGNAL_EXIT_BASE + received))
    if not quiet:
        kind = "Flower's simulation of" if simulation else "a superlink and"
        print(f"starting {kind} {clients} nodes here; logs are in {place / 'logs'}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="fedsieve-") as home, LocalCluster(Path(home), place / "logs") as federation:
        federation.start_superlink(("--insecure", *(("--simulation",) if simulation else ())))
        for client in range(0 if simulation else clients):
            federation.start_node(client, clients)
        identifier = federation.submit(folder, overrides, clients if simulation else None)
        show_progress(federation, identifier, place, int(settings.get("rounds", 0)), str(app["project"]["name"]), quiet=quiet)
        state, details = federation.status(identifier)
        if state != COMPLETED_STATUS or not (place / run_directory.RESULT).exists():
            why = failure_reason(place, identifier, details)
            raise LocalClusterError(
                f"the run ended as {state}: {why}; logs are in {place / 'logs'}; once that is mended, {resume_hint(folder, place)}"
            )
    result = {**json_text.loads((place / run_directory.RESULT).read_text()), "run": str(place)}
    if json:
        print(json_text.dumps(result))
    elif not quiet:
        print_result(result, place)
    return 0


def num_nodes(settings: dict[str, Any], user_set: dict[str, Any], nodes: int | None) -> int:
    """How many nodes, one for each client; what is typed twice is refused, not chosen from."""
    if "run-dir" in user_set:
        raise ValueError(f"--run-config run-dir={user_set['run-dir']} has no meaning here; use --out {user_set['run-dir']}")
    if nodes is None:
        nodes, name = settings["clients"], "clients"
    elif "clients" in user_set:
        raise ValueError(f"--nodes {nodes} and --run-config clients={user_set['clients']} say the same thing; use one of them")
    else:
        name = "--nodes"
    if type(nodes) is not int or nodes < 1:
        raise ValueError(f"{name} must be a whole number, at least 1; got {nodes}")
    return nodes


def choose_run_directory(name: str, out: Path | None, resume: Path | None) -> Path:
    """A folder of its own for a new run, or that of the one to go on with."""
    if resume is None:
        return run_directory.create_run_dir(out or Path("runs") / name, explicit=out is not None)
    if out is not None:
        raise ValueError(f"--out {out} has no meaning with --resume {resume}, which goes on in its own folder")
    if not (resume / run_directory.CONFIG).exists():
        raise run_directory.RunDirectoryError(f"--resume {resume} holds no run; name the folder of a run of this app")
    return resume


def read_app(folder: Path) -> dict[str, Any]:
    """The pyproject.toml of a Flower app."""
    path = folder / "pyproject.toml"
    try:
        found = tomllib.loads(path.read_text())
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}; `fedsieve flower new {folder}` writes an app") from None
    except tomllib.TOMLDecodeError as problem:
        raise ValueError(f"{path} is not TOML: {problem}") from None
    if "components" not in found.get("tool", {}).get("flwr", {}).get("app", {}) or "name" not in found.get("project", {}):
        raise ValueError(f"{folder} is no Flower app: its pyproject.toml has no [tool.flwr.app.components]")
    return found


def parse_pairs(arguments: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE, one or several in a word as Flower takes them; values as in TOML, a bare word is text."""
    found: dict[str, Any] = {}
    for word in arguments:
        if not PAIR_PATTERN.search(word) or PAIR_PATTERN.sub("", word).strip():
            raise ValueError(f"--run-config takes KEY=VALUE, text with blanks in quotes; got {word}")
        for name, text in PAIR_PATTERN.findall(word):
            try:
                found[name] = tomllib.loads(f"value = {text}")["value"]
            except tomllib.TOMLDecodeError:
                found[name] = text
    return found


def merge_settings(config: dict[str, Any], arguments: tuple[str, ...]) -> dict[str, Any]:
    """The app's settings with those changed that were typed; Flower takes no others."""
    flat = {name: value for name, value in config.items() if not isinstance(value, dict)}
    flat |= {f"{part}.{name}": value for part, rest in config.items() if isinstance(rest, dict) for name, value in rest.items()}
    for name in parse_pairs(arguments):
        if name not in flat:
            raise ValueError(f"--run-config {name}: the app has no such setting; write it into its pyproject.toml first")
    for name in ("clients", "run-dir"):
        if name not in flat:
            raise ValueError(f"the app's pyproject.toml has no setting {name} below [tool.flwr.app.config]; add it")
    return flat | parse_pairs(arguments)


def show_progress(cluster: LocalCluster, run_id: str, run_dir: Path, num_rounds: int, title: str, *, quiet: bool) -> None:
    """Show each round as the server writes it, until the run ends."""
    seen = len(complete_lines(run_dir / run_directory.METRICS))
    follower, told = cluster.stream_log(run_id), Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    with ProgressBar(num_rounds, title, "round", quiet=quiet, num_done=seen) as bar:
        while True:
            over = follower.poll() is not None
            lines = complete_lines(run_dir / run_directory.METRICS)
            for row in map(json_text.loads, lines[seen:]):
                metric = next((f", {name} {format_number(row[name])}" for name in SHOWN_METRICS if name in row), "")
                bar.advance(f"{len(row['replied'])} of {len(row['cohort'])} replied{metric}")
                for client, problem in row["rejected"]:
                    told.print(f"round {row['round']}, client {client}: {problem}", markup=False)
            seen = len(lines)
            if over:
                return
            time.sleep(POLL_SECONDS)


def complete_lines(path: Path) -> list[str]:
    """The lines of a file that another process appends to; the last may be half-written."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def failure_reason(run_dir: Path, run_id: str, details: str) -> str:
    """Why a run failed: the last error its server named, or what Flower says."""
    log = (run_dir / "logs" / f"server-{run_id}.log").read_text(errors="replace")
    named = re.findall(r"^(?:[\w.]*\.)?(?:QuorumError|FolderError|CheckpointError|ValueError): (.+)$", log, flags=re.MULTILINE)
    return named[-1] if named else details


def resume_hint(folder: Path, run_dir: Path) -> str:
    """What to type after a run failed: it goes on where it had begun to write."""
    if (run_dir / run_directory.CONFIG).exists():
        return f"go on with: fedsieve flower run {folder} --resume {run_dir}"
    return f"start again with: fedsieve flower run {folder}"


def print_result(result: dict[str, Any], run_dir: Path) -> None:
    """The table a newcomer reads."""
    table = Table(title=f"{result['method']}, {result['rounds']} rounds over Flower", show_header=False, title_justify="left")
    table.add_row("weights kept", f"exactly {result['nonzero']} of {result['size']}")
    for name in SHOWN_METRICS:
        if name in result:
            table.add_row(name, format_number(result[name]))
    table.add_row("bytes sent", f"{format_bytes(result['bytes_up'])} up, {format_bytes(result['bytes_down'])} down")
    table.add_row(
        "  Flower's envelope", f"{format_bytes(result['flower_overhead_up'])} up, {format_bytes(result['flower_overhead_down'])} down"
    )
    refused = ", ".join(f"client {client}: {count}" for client, count in result["rejected"].items())
    table.add_row("missing or refused", refused or "none")
    table.add_row("time", f"{format_seconds(result['seconds'])} s")
    table.add_row("run folder", str(run_dir))
    Console(highlight=False).print(table)
