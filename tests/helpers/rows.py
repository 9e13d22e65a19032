"""Rows of a study made by hand."""

NO_BYTES = {way + count: 0 for way in ("up", "down") for count in ("", "_payload", "_paper_formula")}


def row(label, seed=0, state="done", metric="r2", density=0.05, trace=None, data=None, config=None, **values):
    """A stored run; what is not named is a value of its result."""
    found = {"key": f"{label}{seed}", "label": label, "seed": seed, "state": state, "metric": metric, "density": density, "trace": trace}
    sizes, curves = values.pop("bytes", NO_BYTES), values.pop("curves", {})
    values = {"value": values.get("r2"), **values} if state == "done" else {}
    shared = {
        "reason": "why",
        "note": None,
        "data": data,
        "rounds": 10,
        "version": "1.0",
        "config": config or {"rounds": 10, "algorithm": {"bits": 8}},
    }
    return found | shared | {"values": values, "curves": curves, "bytes": sizes}


def cells(method, setting, quality, *, spread=0.001, seeds=(0, 1, 2), **more):
    """A cell of a table on some seeds."""
    label = {"task": "lr", "algorithm": method, "setting": setting, "target": 0.05, "truth": 0.05, "skew": "non-iid"} | more
    return [row(label, seed, r2=quality + spread * seed, tdr=0.5) for seed in seeds]
