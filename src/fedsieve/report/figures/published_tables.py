"""Table and figure of the study on other people's tables: their numbers beside ours, and the bytes of both."""

from typing import Any

from fedsieve.report.figures import style
from fedsieve.report.figures.style import FigureWriter
from fedsieve.report.published_tables import POOLED_TRAINING, TABLES, PublishedTable
from fedsieve.studies import results
from fedsieve.studies.results import OURS, THEIRS, Row

TO_BE_DONE, NOT_STATED, NOT_RUN = "TBD", "not stated", "not run here"
BYTES_THEIRS, BYTES_HERE = "bytes theirs", "bytes here"
NOTE = (
    f"role {THEIRS}: their algorithm with their options, run here; {BYTES_THEIRS}: all weights in float32 for each client and direction "
    f"(with positions of four bytes, if it sends a part); {BYTES_HERE}: the same 32-bit values in our wire format, or, role {OURS}, "
    f"what our algorithm sends with its defaults "
    f"(local steps and batch size are those of the table), or with the table's constant learning rate"
)


def table_entries(rows: list[Row]) -> list[dict[str, Any]]:
    """Return one entry per table, row and round: the published number, the measured one and the bytes until then.

    A table without runs has its published numbers only.
    """
    entries = []
    for name, table in TABLES.items():
        part = results.filter_rows(rows, table=name)
        labels = dict.fromkeys((row["label"]["row"], row["label"]["role"]) for row in part)
        absent = [(row, THEIRS) for row in table.values if (row, THEIRS) not in labels]
        for row, role in (*labels, *absent):
            group = results.filter_rows(part, row=row, role=role)
            entries += [_entry(name, table, row, role, round, group) for round in table.rounds]
    return entries


def _entry(name: str, table: PublishedTable, row: str, role: str, round: int, group: list[Row]) -> dict[str, Any]:
    values = table.values.get(row)
    published = None if values is None else values[table.rounds.index(round)]
    open_cell = NOT_STATED if table.is_scaled else TO_BE_DONE
    done = [(value_at_round(run, table.measure, round), value_at_round(run, "bytes", round)) for run in results.done_rows(group)]
    return {
        "table": name,
        "row": row,
        "role": role,
        "measure": table.measure,
        "round": round,
        "published": open_cell if role == THEIRS and published is None else published,
        "measured": results.mean_and_sd([value for value, _ in done]) if group else NOT_RUN,
        BYTES_THEIRS: table.bytes_until(row, round) if role == THEIRS and row != POOLED_TRAINING else None,
        BYTES_HERE: results.mean_and_sd([num_bytes for _, num_bytes in done]) if group else table.recoded_bytes_until(row, round),
        "finished": f"{len(done)}/{len(group)}",
    }


def value_at_round(row: Row, name: str, round: int) -> float:
    """Return a curve's value at the last stored round that is not after `round`, or at the first."""
    pairs = zip(row["curves"]["round"], row["curves"][name], strict=True)
    values = [value for stored, value in pairs if stored <= round]
    return values[-1] if values else row["curves"][name][0]


def table_sources() -> list[str]:
    """Return one note per table: its source, and what its measure is."""
    return [f"{name}: {table.source}{'; ' + table.note if table.note else ''}" for name, table in TABLES.items()]


def draw(rows: list[Row], writer: FigureWriter) -> None:
    """Draw the measure against the bytes, one panel per table: published numbers as rings, measured ones as points."""
    entries = table_entries(rows)
    names = list(dict.fromkeys(entry["table"] for entry in entries))
    num_columns = min(len(names), 3)
    num_rows = -(-len(names) // num_columns)
    with writer.figure("tables", 7.2, 0.9 + 2.4 * num_rows) as figure:
        panels = style.create_panels(figure, num_columns, num_rows, num_used=len(names))
        for axes, name in zip(panels, names, strict=True):
            table = TABLES[name]
            shown = [entry for entry in entries if entry["table"] == name and entry["round"] == table.rounds[-1]]
            for place, entry in enumerate(shown):
                colour = style.PALETTE[place % len(style.PALETTE)]
                if isinstance(entry["published"], float) and entry[BYTES_THEIRS] is not None:
                    axes.plot(entry[BYTES_THEIRS], entry["published"], "o", ms=7, mfc="none", color=colour)
                is_measured = entry["measured"] != NOT_RUN
                if is_measured and entry[BYTES_HERE] is not None and entry[BYTES_HERE]["mean"] is not None:
                    marker = "s" if entry["role"] == OURS else "o"
                    axes.plot(entry[BYTES_HERE]["mean"], entry["measured"]["mean"], marker, ms=4, color=colour, label=entry["row"])
            axes.set(xscale="log", title=name, xlabel="bytes, up and down", ylabel=table.measure)
            axes.legend(fontsize=5.5)
        figure.suptitle("rings: published; points: their algorithm, run here; squares: ours", fontsize=8.5)
