"""Compare algorithms: mean and sd over seeds, paired differences with confidence intervals, at equal rounds and at equal bytes."""

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsieve.algorithms import ALGORITHMS
from fedsieve.storage import run_directory

if TYPE_CHECKING:
    from fedsieve.experiments.resolve import ResolvedRun

Row = dict[str, Any]


def parse_algorithms_and_seeds(algorithms: str, seeds: str) -> tuple[list[str], list[int]]:
    """Return names and seeds of comma-separated text, each once."""
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    unknown = [name for name in names if name not in ALGORITHMS]
    if unknown or not names:
        raise ValueError(f"--algorithms takes names out of {', '.join(ALGORITHMS)}; got {', '.join(unknown) or 'none'}")
    if len(set(names)) < len(names):
        raise ValueError(f"--algorithms names an algorithm twice: {algorithms}")
    try:
        numbers = [int(part) for part in seeds.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--seeds takes whole numbers separated by commas, for example 0,1,2; got {seeds}") from None
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"--seeds takes at least one whole number, each once; got {seeds!r}")
    return names, numbers


def comparison_id(runs: "Sequence[Sequence[ResolvedRun]]") -> str:
    """Return a directory name that is determined by the settings."""
    text = json.dumps([run.settings_dict for row in runs for run in row], sort_keys=True)
    return f"compare-{runs[0][0].task}-{blake2b(text.encode(), digest_size=4).hexdigest()}"


def run_name(run: "ResolvedRun") -> str:
    """Return the directory of a run within its comparison."""
    return f"{run.algorithm_name}-seed{run.seed}"


def is_resumable(folder: Path, runs: "Sequence[Sequence[ResolvedRun]]") -> bool:
    """Return whether a directory holds this comparison without a result; raise ValueError if it holds other runs."""
    held = {path.parent.name for path in folder.glob(f"*/{run_directory.CONFIG}")}
    if not held or (folder / run_directory.RESULT).exists():
        return False
    if strange := sorted(held - {run_name(run) for row in runs for run in row}):
        raise run_directory.RunDirectoryError(
            f"--out {folder} holds a comparison of other runs: {', '.join(strange)}; choose another folder"
        )
    return True


def cumulative_bytes(rows: list[Row]) -> np.ndarray:
    """Return the bytes up to each round, in both directions."""
    return np.cumsum([row["bytes_up"] + row["bytes_down"] for row in rows])


def value_at_bytes(rows: list[Row], metric: str, max_bytes: float) -> float | None:
    """Return the metric after the last round within `limit` bytes."""
    paid = int((cumulative_bytes(rows) <= max_bytes).sum())
    return rows[paid - 1][metric] if paid else None


def paired_difference(values: Sequence[float | None], reference: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean difference over common seeds, its standard error and the half-width of its 95 % t interval (None for one seed)."""
    differences = np.array([v - b for v, b in zip(values, reference, strict=True) if v is not None and b is not None])
    if not len(differences):
        return {"difference": None, "interval": None, "error": None}
    if len(differences) == 1:
        return {"difference": float(differences[0]), "interval": None, "error": None}
    from scipy.special import stdtrit  # training does not need it

    error = float(differences.std(ddof=1) / np.sqrt(len(differences)))
    half = float(stdtrit(len(differences) - 1, 0.975) * error)
    return {"difference": float(differences.mean()), "interval": half, "error": error}


def mean_and_sd(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return mean and sd of the values that are not None."""
    there = np.array([v for v in values if v is not None], dtype=float)
    return {
        "mean": float(there.mean()) if len(there) else None,
        "sd": float(there.std(ddof=1)) if len(there) > 1 else None,
    }


def compare_histories(histories: dict[str, list[list[Row]]], metric: str, seeds: list[int]) -> dict[str, Any]:
    """Return one entry per algorithm: after its last round, and at the bytes of the cheapest algorithm of each seed."""
    limits = [min(cumulative_bytes(histories[name][i])[-1] for name in histories) for i in range(len(seeds))]
    final = {name: [rows[-1][metric] for rows in per_seed] for name, per_seed in histories.items()}
    equal = {
        name: [value_at_bytes(rows, metric, limit) for rows, limit in zip(per_seed, limits, strict=True)]
        for name, per_seed in histories.items()
    }
    base = next(iter(histories))
    table = {}
    for name, per_seed in histories.items():
        table[name] = {
            "rounds": len(per_seed[0]),
            "equal_rounds": {**mean_and_sd(final[name]), **paired_difference(final[name], final[base]), "values": final[name]},
            "equal_bytes": {**mean_and_sd(equal[name]), **paired_difference(equal[name], equal[base]), "values": equal[name]},
            "tdr": mean_and_sd([rows[-1].get("tdr") for rows in per_seed]),
            **{
                f"bytes_{way}{part}": float(np.mean([sum(row[f"bytes_{way}{part}"] for row in rows) for rows in per_seed]))
                for way in ("up", "down")
                for part in ("", "_payload", "_paper_formula")
            },
        }
    return {"metric": metric, "seeds": seeds, "base": base, "equal_bytes_limit": float(np.mean(limits)), "algorithms": table}
