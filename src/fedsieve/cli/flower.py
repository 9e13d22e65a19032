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

from fedsieve.cli.options import Flag, Whole
from fedsieve.deployment.local_cluster import COMMANDS, Federation, FederationError, executable
from fedsieve.formatting import Counted, amount, number, size
from fedsieve.storage import run_directory

TEMPLATE = Path(__file__).parents[1] / "deployment" / "template"
PLACEHOLDER = "APP-NAME"
COMPLETED = "finished:completed"
KILLED = 128
"""What a shell adds to the number of a signal."""
LOOK = 0.5
"""Seconds between two looks at what the server wrote."""
TOLD = ("accuracy", "r2", "micro_f1")
PAIR = re.compile(r"""([\w.-]+)=("[^"]*"|'[^']*'|[^\s"']+)""")
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
        raise run_directory.FolderError(f"{folder} is not an empty folder; choose another, nothing is overwritten")
    name = re.sub("[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:32] or "app"
    try:
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder / "pyproject.toml", folder / "README.md"):
            path.write_text(path.read_text().replace(PLACEHOLDER, name))
    except OSError as problem:
        raise run_directory.FolderError(f"cannot write an app into {folder}: {problem.strerror}") from None
    print(f"wrote a Flower app into {folder}; your own rows and module go into")
    print(f"  {folder / 'app' / 'task.py'}")
    print("run it as it is, three nodes on this machine, with")
    print(f"  fedsieve flower run {folder}")
    return 0


def run(
    folder: Path,
    *,
    nodes: Whole | None = None,
    simulation: Flag = False,
    run_config: Pairs = (),
    out: Path | None = None,
    resume: Path | None = None,
    quiet: Flag = False,
    json: Flag = False,
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
    settings = changed(app["tool"]["flwr"]["app"].get("config", {}), run_config)
    clients = counted(settings, parsed(run_config), nodes)
    for command in COMMANDS:
        executable(command)
    if simulation and find_spec("ray") is None:
        raise FederationError("Flower's simulation needs Ray; install it with: pip install 'fedsieve[flower]'")
    place = chosen_place(str(app["project"]["name"]), out, resume)
    overrides = {**parsed(run_config), "clients": clients, "run-dir": str(place.resolve())}
    for ending in (signal.SIGTERM, signal.SIGHUP):  # so that what was started is stopped then, too
        signal.signal(ending, lambda received, _: sys.exit(KILLED + received))
    if not quiet:
        kind = "Flower's simulation of" if simulation else "a superlink and"
        print(f"starting {kind} {clients} nodes here; logs are in {place / 'logs'}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="fedsieve-") as home, Federation(Path(home), place / "logs") as federation:
        federation.superlink(("--insecure", *(("--simulation",) if simulation else ())))
        for client in range(0 if simulation else clients):
            federation.node(client, clients)
        identifier = federation.submit(folder, overrides, clients if simulation else None)
        watch(federation, identifier, place, int(settings.get("rounds", 0)), str(app["project"]["name"]), quiet=quiet)
        state, details = federation.status(identifier)
        if state != COMPLETED or not (place / run_directory.RESULT).exists():
            why = reason(place, identifier, details)
            raise FederationError(
                f"the run ended as {state}: {why}; logs are in {place / 'logs'}; once that is mended, {way_on(folder, place)}"
            )
    result = {**json_text.loads((place / run_directory.RESULT).read_text()), "run": str(place)}
    if json:
        print(json_text.dumps(result))
    elif not quiet:
        show(result, place)
    return 0


def counted(settings: dict[str, Any], typed: dict[str, Any], nodes: int | None) -> int:
    """How many nodes, one for each client; what is typed twice is refused, not chosen from."""
    if "run-dir" in typed:
        raise ValueError(f"--run-config run-dir={typed['run-dir']} has no meaning here; use --out {typed['run-dir']}")
    if nodes is None:
        nodes, name = settings["clients"], "clients"
    elif "clients" in typed:
        raise ValueError(f"--nodes {nodes} and --run-config clients={typed['clients']} say the same thing; use one of them")
    else:
        name = "--nodes"
    if type(nodes) is not int or nodes < 1:
        raise ValueError(f"{name} must be a whole number, at least 1; got {nodes}")
    return nodes


def chosen_place(name: str, out: Path | None, resume: Path | None) -> Path:
    """A folder of its own for a new run, or that of the one to go on with."""
    if resume is None:
        return run_directory.claim(out or Path("runs") / name, chosen=out is not None)
    if out is not None:
        raise ValueError(f"--out {out} has no meaning with --resume {resume}, which goes on in its own folder")
    if not (resume / run_directory.CONFIG).exists():
        raise run_directory.FolderError(f"--resume {resume} holds no run; name the folder of a run of this app")
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


def parsed(words: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE, one or several in a word as Flower takes them; values as in TOML, a bare word is text."""
    found: dict[str, Any] = {}
    for word in words:
        if not PAIR.search(word) or PAIR.sub("", word).strip():
            raise ValueError(f"--run-config takes KEY=VALUE, text with blanks in quotes; got {word}")
        for name, text in PAIR.findall(word):
            try:
                found[name] = tomllib.loads(f"value = {text}")["value"]
            except tomllib.TOMLDecodeError:
                found[name] = text
    return found


def changed(config: dict[str, Any], words: tuple[str, ...]) -> dict[str, Any]:
    """The app's settings with those changed that were typed; Flower takes no others."""
    flat = {name: value for name, value in config.items() if not isinstance(value, dict)}
    flat |= {f"{part}.{name}": value for part, rest in config.items() if isinstance(rest, dict) for name, value in rest.items()}
    for name in parsed(words):
        if name not in flat:
            raise ValueError(f"--run-config {name}: the app has no such setting; write it into its pyproject.toml first")
    for name in ("clients", "run-dir"):
        if name not in flat:
            raise ValueError(f"the app's pyproject.toml has no setting {name} below [tool.flwr.app.config]; add it")
    return flat | parsed(words)


def watch(federation: Federation, run: str, place: Path, rounds: int, title: str, *, quiet: bool) -> None:
    """Show each round as the server writes it, until the run ends."""
    seen = len(whole_lines(place / run_directory.METRICS))
    follower, told = federation.follow(run), Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    with Counted(rounds, title, "round", quiet=quiet, finished=seen) as bar:
        while True:
            over = follower.poll() is not None
            lines = whole_lines(place / run_directory.METRICS)
            for row in map(json_text.loads, lines[seen:]):
                metric = next((f", {name} {number(row[name])}" for name in TOLD if name in row), "")
                bar.advance(f"{len(row['replied'])} of {len(row['cohort'])} replied{metric}")
                for client, problem in row["rejected"]:
                    told.print(f"round {row['round']}, client {client}: {problem}", markup=False)
            seen = len(lines)
            if over:
                return
            time.sleep(LOOK)


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that another process appends to; the last may be half-written."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def reason(place: Path, run: str, details: str) -> str:
    """Why a run failed: the last error its server named, or what Flower says."""
    log = (place / "logs" / f"server-{run}.log").read_text(errors="replace")
    named = re.findall(r"^(?:[\w.]*\.)?(?:QuorumError|FolderError|CheckpointError|ValueError): (.+)$", log, flags=re.MULTILINE)
    return named[-1] if named else details


def way_on(folder: Path, place: Path) -> str:
    """What to type after a run failed: it goes on where it had begun to write."""
    if (place / run_directory.CONFIG).exists():
        return f"go on with: fedsieve flower run {folder} --resume {place}"
    return f"start again with: fedsieve flower run {folder}"


def show(result: dict[str, Any], place: Path) -> None:
    """The table a newcomer reads."""
    table = Table(title=f"{result['method']}, {result['rounds']} rounds over Flower", show_header=False, title_justify="left")
    table.add_row("weights kept", f"exactly {result['nonzero']} of {result['size']}")
    for name in TOLD:
        if name in result:
            table.add_row(name, number(result[name]))
    table.add_row("bytes sent", f"{size(result['bytes_up'])} up, {size(result['bytes_down'])} down")
    table.add_row("  Flower's envelope", f"{size(result['envelope_up'])} up, {size(result['envelope_down'])} down")
    refused = ", ".join(f"client {client}: {count}" for client, count in result["rejected"].items())
    table.add_row("missing or refused", refused or "none")
    table.add_row("time", f"{amount(result['seconds'])} s")
    table.add_row("run folder", str(place))
    Console(highlight=False).print(table)
