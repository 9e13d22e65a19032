"""MODEL_CARD.md, the text beside a model: its data, density, bytes, metrics and limits. Everything in it is a fact of the run."""

from collections.abc import Mapping
from typing import Any

from fedsieve import __version__
from fedsieve.formatting import escape_controls, format_bytes, format_number
from fedsieve.models.sparse_model import SparseModel

LIMITS = (
    "The metric is of one run with one seed on the examples named above; it says nothing about other data.",
    "Weights and which of them are kept can say something about the training examples. They are not encrypted.",
)


def model_card(model: SparseModel, result: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    """Return the card of a model in Markdown, from the result of its run and its metrics on held-out examples."""
    metadata, counted = model.metadata, model.size - model.num_ungated
    ungated = f"; {model.num_ungated} more without a gate are not counted" if model.num_ungated else ""
    outputs = "a number" if metadata.classes is None else f"{len(metadata.classes)} classes: {', '.join(metadata.classes[:10])}"
    facts = {
        "kind": "linear model" if metadata.factory is None else f"module of `{metadata.factory}`",
        "one example": f"{' x '.join(map(str, metadata.input_shape))} numbers",
        "output": outputs + (", ..." if len(metadata.classes or ()) > 10 else ""),
        "trained by": f"fedsieve {__version__}, algorithm `{metadata.algorithm}`, {result['rounds']} rounds, seed {result['seed']}",
        "data": result.get("data") or "held by the clients of a deployment; the server saw none of them",
        "density": f"{model.density:.4g}: {model.num_nonzero} of {counted} weights are not zero{ungated}",
        "bytes sent": f"{format_bytes(result['bytes_up'])} up, {format_bytes(result['bytes_down'])} down",
        "replies": f"{result['replied']} of {result['asked']} were received",
        **(_quality(metrics, result.get("oracle_value")) or {"quality": "not measured: the server has no test examples"}),
        **_privacy(result),
    }
    lines = [
        f"# A model of {metadata.task}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_cell(text)} |" for name, text in facts.items()),
        "",
        "## Limits",
        "",
        *(f"- {_cell(text)}" for text in (*LIMITS, *filter(None, (result.get("note"),)))),
        "",
        "`fedsieve inspect`, `predict` and `export` read this folder. `config.toml` repeats the run; `report.html` shows it.",
        "",
    ]
    return "\n".join(map(escape_controls, lines))


def _quality(metrics: Mapping[str, float], oracle_value: float | None) -> dict[str, str]:
    """Return each metric as text; `oracle_value` is what the true weights reach, if they are known."""
    best = "" if oracle_value is None else f"; the true weights reach {format_number(oracle_value)}"
    return {f"{name} on held-out examples": format_number(value) + best for name, value in metrics.items()}


def _privacy(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the guarantee of a private run."""
    if result.get("epsilon") is None:
        return {"differential privacy": "none"}
    return {"differential privacy": f"epsilon {format_number(result['epsilon'])} at delta {result['delta']:g}, for one client"}


def _cell(text: str) -> str:
    """Return text that stays inside one cell of a table and is no markup."""
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|")
