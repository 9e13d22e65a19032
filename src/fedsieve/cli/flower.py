"""`fedsieve flower`: write a Flower app from a template, and run an app on a local cluster."""

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
from rich.table import Table

from fedsieve.cli.options import Switch
from fedsieve.core.settings import flatten
from fedsieve.deployment.local_cluster import FLOWER_COMMANDS, LocalCluster, LocalClusterError, find_executable
from fedsieve.formatting import PlainConsole, ProgressBar, format_bytes, format_number, format_seconds
from fedsieve.storage import run_directory

TEMPLATE = Path(__file__).parents[1] / "deployment" / "template"
PLACEHOLDER = "APP-NAME"
COMPLETED_STATUS = "finished:completed"
SIGNAL_EXIT_BASE = 128
"""A shell adds this to the number of the signal that ended a process."""
POLL_SECONDS = 0.5
"""Seconds between two reads of the server's metrics."""
SHOWN_METRICS = ("accuracy", "r2", "micro_f1")
PAIR_PATTERN = re.compile(r"""([\w.-]+)=("[^"]*"|'[^']*'|[^\s"']+)""")
Pairs = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]


def flower_app() -> App:
    """Return the commands `new` and `run`."""
    app = App(name="flower", help="Write a Flower app, and run it on this machine.", result_action="return_value")
    app.command(new)
    app.command(run)
    return app


def new(folder: Path) -> int:
    """Write a complete Flower app for simulation and deployment, to be filled with your own module and examples.

    Parameters
    ----------
    folder
        folder of the app; new or empty
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise run_directory.RunDirectoryError(f"{folder} is not an empty folder, and nothing is overwritten; choose another")
    name = re.sub("[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:32] or "app"
    try:
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder / "pyproject.toml", folder / "README.md"):
            path.write_text(path.read_text().replace(PLACEHOLDER, name))
    except OSError as error:
        raise run_directory.RunDirectoryError(f"cannot write an app into {folder}: {error.strerror}") from None
    print(f"wrote a Flower app to {folder}; put your module and your examples into")
    print(f"  {folder / 'app' / 'task.py'}")
    print("run it with three nodes on this machine:")
    print(f"  fedsieve flower run {folder}")
    return 0


def run(
    folder: Path,
    *,
    nodes: int | None = None,
    simulation: Switch = False,
    run_config: Pairs = (),
    out: Path | None = None,
    resume: Path | None = None,
    quiet: Switch = False,
    json: Switch = False,
) -> int:
    """Run a Flower app on this machine, with a superlink and nodes on loopback that end with the run.

    Parameters
    ----------
    folder
        the app
    nodes
        number of nodes, one per client (default: the setting clients of the app)
    simulation
        let Flower simulate the nodes with Ray instead of starting a process for each
    run_config
        'KEY=VALUE KEY=VALUE': settings of the app to change for this run; can be repeated
    out
        run directory (default: runs/NAME, after the app)
    resume
        run directory of an interrupted run of this app, which continues from its last checkpoint
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
    run_dir = choose_run_directory(str(app["project"]["name"]), out, resume)
    overrides = {**parse_pairs(run_config), "clients": clients, "run-dir": str(run_dir.resolve())}
    for number in (signal.SIGTERM, signal.SIGHUP):  # leave the context below, which stops all processes
        signal.signal(number, lambda received, _: sys.exit(SIGNAL_EXIT_BASE + received))
    if not quiet:
        kind = "Flower's simulation of" if simulation else "a superlink and"
        print(f"starting {kind} {clients} nodes on this machine; logs are in {run_dir / 'logs'}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="fedsieve-") as home, LocalCluster(Path(home), run_dir / "logs") as cluster:
        cluster.start_superlink(("--insecure", *(("--simulation",) if simulation else ())))
        for client in range(0 if simulation else clients):
            cluster.start_node(client, clients)
        run_id = cluster.submit(folder, overrides, clients if simulation else None)
        show_progress(cluster, run_id, run_dir, int(settings.get("rounds", 0)), str(app["project"]["name"]), quiet=quiet)
        state, details = cluster.status(run_id)
        if state != COMPLETED_STATUS or not (run_dir / run_directory.RESULT).exists():
            reason = failure_reason(run_dir, run_id, details)
            raise LocalClusterError(
                f"the run ended as {state}: {reason}; logs are in {run_dir / 'logs'}; fix the cause, then {resume_hint(folder, run_dir)}"
            )
    result = {**run_directory.read_result(run_dir), "run": str(run_dir)}
    if json:
        print(json_text.dumps(result))
    elif not quiet:
        print_result(result, run_dir)
    return 0


def num_nodes(settings: dict[str, Any], user_set: dict[str, Any], nodes: int | None) -> int:
    """Return the number of nodes, one per client; refuse a number that is set twice."""
    if "run-dir" in user_set:
        raise ValueError(f"--run-config run-dir={user_set['run-dir']} is set by this command; use --out {user_set['run-dir']}")
    if nodes is None:
        nodes, name = settings["clients"], "clients"
    elif "clients" in user_set:
        raise ValueError(f"--nodes {nodes} and --run-config clients={user_set['clients']} set the same thing; use one of them")
    else:
        name = "--nodes"
    if type(nodes) is not int or nodes < 1:
        raise ValueError(f"{name} must be a whole number, at least 1; got {nodes}")
    return nodes


def choose_run_directory(name: str, out: Path | None, resume: Path | None) -> Path:
    """Create the directory of a new run, or return that of the run to resume."""
    if resume is None:
        return run_directory.create_run_dir(out or Path("runs") / name, explicit=out is not None)
    if out is not None:
        raise ValueError(f"--out {out} has no meaning with --resume {resume}, which continues in its run directory; leave out --out")
    if not (resume / run_directory.CONFIG).exists():
        raise run_directory.RunDirectoryError(f"--resume {resume} holds no run; name the run directory of a run of this app")
    run_directory.require_no_links(resume)
    return resume


def read_app(folder: Path) -> dict[str, Any]:
    """Read the pyproject.toml of a Flower app."""
    path = folder / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; `fedsieve flower new {folder}` writes an app") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    if "components" not in project.get("tool", {}).get("flwr", {}).get("app", {}) or "name" not in project.get("project", {}):
        raise ValueError(f"{folder} is no Flower app: its pyproject.toml has no [tool.flwr.app.components]")
    return project


def parse_pairs(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Parse KEY=VALUE pairs, one or several per argument as in Flower. Values are TOML; a bare word is text."""
    settings: dict[str, Any] = {}
    for argument in arguments:
        if not PAIR_PATTERN.search(argument) or PAIR_PATTERN.sub("", argument).strip():
            raise ValueError(f"--run-config takes KEY=VALUE, with text in quotes if it has blanks; got {argument}")
        for name, text in PAIR_PATTERN.findall(argument):
            try:
                settings[name] = tomllib.loads(f"value = {text}")["value"]
            except tomllib.TOMLDecodeError:
                settings[name] = text
    return settings


def merge_settings(config: dict[str, Any], arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the app's settings, with those replaced that the user set; Flower accepts no others."""
    flat, user_set = flatten(config), parse_pairs(arguments)
    for name in user_set:
        if name not in flat:
            raise ValueError(f"--run-config {name}: the app has no such setting; write it into its pyproject.toml first")
    for name in ("clients", "run-dir"):
        if name not in flat:
            raise ValueError(f"the app's pyproject.toml has no setting {name} in [tool.flwr.app.config]; add it")
    return flat | user_set


def show_progress(cluster: LocalCluster, run_id: str, run_dir: Path, num_rounds: int, title: str, *, quiet: bool) -> None:
    """Show each round when the server has written it, until the run ends."""
    num_shown = len(complete_lines(run_dir / run_directory.METRICS))
    log_process, console = cluster.stream_log(run_id), PlainConsole(stderr=True, quiet=quiet, soft_wrap=True)
    with ProgressBar(num_rounds, title, "round", quiet=quiet, num_done=num_shown) as bar:
        while True:
            has_ended = log_process.poll() is not None
            lines = complete_lines(run_dir / run_directory.METRICS)
            for row in map(json_text.loads, lines[num_shown:]):
                metric = next((f", {name} {format_number(row[name])}" for name in SHOWN_METRICS if name in row), "")
                bar.advance(f"{len(row['replied'])} of {len(row['cohort'])} replied{metric}")
                for client, reason in row["rejected"]:
                    console.print(f"round {row['round']}, client {client}: {reason}")
            num_shown = len(lines)
            if has_ended:
                return
            time.sleep(POLL_SECONDS)


def complete_lines(path: Path) -> list[str]:
    """Return the complete lines of a file to which another process appends."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def failure_reason(run_dir: Path, run_id: str, details: str) -> str:
    """Return the last error in the server's log, or Flower's details if there is none."""
    log = (run_dir / "logs" / f"server-{run_id}.log").read_text(errors="replace")
    errors = re.findall(
        r"^(?:[\w.]*\.)?(?:QuorumError|RunDirectoryError|WriteError|CheckpointError|SettingsChangedError|ValueError): (.+)$",
        log,
        flags=re.MULTILINE,
    )
    return errors[-1] if errors else details


def resume_hint(folder: Path, run_dir: Path) -> str:
    """Return the command that resumes a failed run, or starts it again if it had written nothing."""
    if (run_dir / run_directory.CONFIG).exists():
        return f"resume with: fedsieve flower run {folder} --resume {run_dir}"
    return f"start again with: fedsieve flower run {folder}"


def print_result(result: dict[str, Any], run_dir: Path) -> None:
    """Print the table of results."""
    table = Table(title=f"{result['algorithm']}, {result['rounds']} rounds over Flower", show_header=False, title_justify="left")
    table.add_row("weights kept", f"exactly {result['nonzero']} of {result['size']}")
    for name in SHOWN_METRICS:
        if name in result:
            table.add_row(name, format_number(result[name]))
    table.add_row("bytes sent", f"{format_bytes(result['bytes_up'])} up, {format_bytes(result['bytes_down'])} down")
    table.add_row(
        "  added by Flower", f"{format_bytes(result['flower_overhead_up'])} up, {format_bytes(result['flower_overhead_down'])} down"
    )
    rejected = ", ".join(f"client {client}: {count}" for client, count in result["rejected_by_client"].items())
    table.add_row("missing or rejected", rejected or "none")
    table.add_row("time", f"{format_seconds(result['seconds'])} s")
    table.add_row("run directory", str(run_dir))
    PlainConsole().print(table)
