"""The claims of the paper, evaluated on stored rows under two recipes: the paper's and the recommended one."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import inf, log10
from typing import Any, NamedTuple

from fedsieve.report.tables import metric_name
from fedsieve.report.verdicts import (
    HOLDS,
    NOT_EVALUATED,
    UNDECIDED,
    Check,
    Verdict,
    make_check,
    make_range_check,
    make_verdict,
    to_document,
)
from fedsieve.studies import results
from fedsieve.studies.results import (
    IID,
    NON_IID,
    PAPER_RECIPE,
    PUBLISHED,
    RECOMMENDED,
    RECOMMENDED_DUAL,
    SWEPT_STEP_RULES,
    TUNED,
    UNCONSTRAINED,
    Row,
)

RECIPES = {"paper": PUBLISHED, "recommended": RECOMMENDED}
"""Recipes of FLoPS and FLoPS-PA, and their value of the label `setting`."""
ITER_HT_SETTING = "FedIter-HT"
"""The key of a case that holds the setting of FedIter-HT."""
LITTLE_LOSS, AS_ACCURATE, SAME_RESULT = 0.05, 0.01, 0.01
"""The largest losses in R2 or accuracy that count as little, as accurate, and as the same result."""
STABLE_OVERLAP, ACTIVE_DROP, LAST_OVERLAP = 0.9, 0.02, 0.99
"""A stable phase has at least this overlap of consecutive epochs, an active one falls by this; above the last, nothing changes."""
RATE_LOSS, RATE_DECADES, MIN_WORKING_R2 = 0.05, 1.0, 0.5
"""Good learning rates lose at most this against the best one; a wide range has these decades; below this R2 no rate works."""
DENSITY_BOUNDS = {"expected_density": ("expected density", 0.05), "test_density": ("test-time density", 0.02)}
"""The name of each density, and its largest relative deviation from the target."""
FEWER_BYTES, TWICE_THE_BYTES = (5.0, None), (1.8, 2.2)
"""Bounds of the ratios of bytes that count as far fewer and as twice as many."""
SLOWER = 1.2
"""The largest ratio of rounds that counts as the same rate of convergence."""
TASKS = ("lr", "lg", "mc")
Studies = Mapping[str, list[Row]]


def count_unfinished(rows: Sequence[Row]) -> str:
    """Return how many runs did not finish, as text; empty if all did."""
    unfinished = results.diverged_or_failed_rows(rows)
    return f"{len(unfinished)} of {len(rows)} runs {unfinished[0]['state']}" if unfinished else ""


def paired_values(rows: Sequence[Row], base: Sequence[Row], name: str, base_name: str | None = None) -> list[float]:
    """Return the differences of a value on the seeds that both finished."""
    values = {row["seed"]: row["values"].get(name) for row in results.done_rows(rows)}
    reference = {row["seed"]: row["values"].get(base_name or name) for row in results.done_rows(base)}
    shared = sorted(seed for seed in values.keys() & reference.keys() if None not in (values[seed], reference[seed]))
    return [values[seed] - reference[seed] for seed in shared]


def check_difference(
    case: dict[str, Any], quantity: str, rows: Sequence[Row], base: Sequence[Row], name: str, at_least: float, base_name: str | None = None
) -> list[Check]:
    """Return the check of a paired difference. Runs of the claimed algorithm that did not finish fail it; those of the base are noted."""
    values = paired_values(rows, base, name, base_name)
    if not rows or not results.done_rows(base):
        return []
    note = count_unfinished(base)
    note = f"of the other {note}" if note else ""
    check = make_check(case, quantity, values, at_least=at_least, unfinished=count_unfinished(rows), note=note)
    return [check] if check else []


def check_densities(case: dict[str, Any], rows: Sequence[Row]) -> list[Check]:
    """Return the checks of expected and test-time density after the last round, relative to the target."""
    checks = []
    for name, (title, bound) in DENSITY_BOUNDS.items():
        values = [row["values"][name] / row["density"] - 1 for row in results.done_rows(rows)]
        case, unfinished = case | {"what": title}, count_unfinished(rows)
        check = make_check(case, "deviation from the target, relative", values, at_least=-bound, at_most=bound, unfinished=unfinished)
        checks += [check] if check else []
    return checks


def density_reached(studies: Studies, setting: str) -> list[Check]:
    """51: both algorithms reach the density under heterogeneity, and lose little against the model without a constraint."""
    rows = results.filter_rows(studies.get("heterogeneity", []), skew=NON_IID)
    checks: list[Check] = []
    for algorithm, unconstrained in UNCONSTRAINED.items():
        for task in TASKS:
            group = results.filter_rows(rows, algorithm=algorithm, setting=setting, task=task)
            dense = results.filter_rows(rows, algorithm=unconstrained, task=task)
            case = {"algorithm": algorithm, "task": task}
            checks += check_densities(case, group)
            name = metric_name(task, "quality")
            quantity = f"{name} minus that of dense {unconstrained}"
            checks += check_difference(
                case | {"what": "little loss"}, quantity, group, dense, "value", -LITTLE_LOSS, "value_before_projection"
            )
    return checks


def flops_beats_iter_ht(studies: Studies, setting: str) -> list[Check]:
    """52: FLoPS beats FedIter-HT: in quality in Tables 1 and 2, in TDR in the other regimes."""
    checks: list[Check] = []
    for study, measure in (("table-1", "quality"), ("table-2", "quality"), ("regimes", "tdr")):
        for base in results.group_by_label(results.filter_rows(studies.get(study, []), algorithm="fed-iter-ht")):
            label = base[0]["label"]
            flops = results.filter_rows(studies[study], **(label | {"algorithm": "flops", "setting": setting}))
            where = {key: label[key] for key in ("task", "truth", "skew", "regime") if key in label}
            case = {ITER_HT_SETTING: label["setting"], **where, "in": study}
            name = metric_name(label["task"], measure)
            checks += check_difference(case, f"{name} difference", flops, base, name, 0.0)
    return checks


def sparse_model_is_better(studies: Studies, setting: str) -> list[Check]:
    """53: on sparse truth, FLoPS(0.05) beats FLoPS(0.95)."""
    rows = results.filter_rows(studies.get("table-1", []), algorithm="flops", setting=setting)
    checks: list[Check] = []
    for task in TASKS:
        sparse, dense = (results.filter_rows(rows, task=task, target=target) for target in (0.05, 0.95))
        name = metric_name(task, "quality")
        checks += check_difference({"task": task}, f"{name} difference", sparse, dense, name, 0.0)
    return checks


def gates_reach_target(studies: Studies, setting: str) -> list[Check]:
    """54: expected and test-time gates fall to the target, with log-alpha scaling and by the dual alone."""
    variant = PAPER_RECIPE if setting == PUBLISHED else RECOMMENDED_DUAL
    scaled = results.filter_rows(studies.get("gates", []), setting=setting)
    unscaled = results.filter_rows(studies.get("constraint", []), algorithm="flops", variant=variant, start="dense")
    checks: list[Check] = []
    for scaling, rows in (("on", scaled), ("off", unscaled)):
        for group in results.group_by_label(rows):
            label = group[0]["label"]
            case = {"task": label["task"], "scaling": scaling, "target": label["target"]}
            falls = [row["curves"]["expected_density"][0] - row["values"]["expected_density"] for row in results.done_rows(group)]
            unfinished = count_unfinished(group)
            check = make_check(case | {"what": "falls"}, "first minus last expected density", falls, at_least=0.0, unfinished=unfinished)
            checks += [check] if check else []
            checks += check_densities(case, group)
    return checks


def overlap_phases(row: Row) -> dict[str, float]:
    """Return the overlap of consecutive epochs: mean of the first and last quarter, and the lowest after the first quarter."""
    overlap = row["trace"]["overlap"]
    path = [overlap[i][i + 1] for i in range(len(overlap) - 1)]
    quarter = max(len(path) // 4, 1)
    return {"first": sum(path[:quarter]) / quarter, "lowest": min(path[quarter:]), "last": sum(path[-quarter:]) / quarter}


def iou_phases(studies: Studies, setting: str) -> list[Check]:
    """55: the overlap of consecutive epochs is high, then low, then high in FLoPS, while FedIter-HT changes until the end."""
    rows = studies.get("iou", [])
    flops = results.filter_rows(rows, algorithm="flops", setting=setting)
    phases = [overlap_phases(row) for row in results.done_rows(flops)]
    drops = [min(phase["first"], phase["last"]) - phase["lowest"] for phase in phases]
    parts = (
        ("stable at first", "overlap, first quarter", [phase["first"] for phase in phases], STABLE_OVERLAP),
        ("active after that", "fall of the overlap", drops, ACTIVE_DROP),
        ("stable at the end", "overlap, last quarter", [phase["last"] for phase in phases], STABLE_OVERLAP),
    )
    unfinished = count_unfinished(flops)
    checks = [
        make_check({"algorithm": "flops", "what": what}, quantity, values, at_least=bound, unfinished=unfinished)
        for what, quantity, values, bound in parts
    ]
    if flops:
        for group in results.group_by_label(results.filter_rows(rows, algorithm="fed-iter-ht")):
            values = [overlap_phases(row)["last"] for row in results.done_rows(group)]
            case = {"algorithm": "fed-iter-ht", ITER_HT_SETTING: group[0]["label"]["setting"], "what": "changes until the end"}
            checks.append(make_check(case, "overlap, last quarter", values, at_most=LAST_OVERLAP))
    return [check for check in checks if check]


def pa_is_cheaper(studies: Studies, setting: str) -> list[Check]:
    """56: FLoPS-PA is as accurate as FedAvg with far fewer bytes, twice those of FedIter-HT by the paper's count.

    FLoPS-PA as published is compared with FedIter-HT as published, with 32 bits both, and recommended with tuned, with 8 bits both.
    """
    rows = studies.get("communication", [])
    iter_ht_setting = PUBLISHED if setting == PUBLISHED else TUNED
    checks: list[Check] = []
    for task in TASKS:
        part = results.filter_rows(rows, task=task)
        pa = results.filter_rows(part, algorithm="flops-pa", setting=setting)
        fed_avg = results.filter_rows(part, algorithm="fed-avg", setting=TUNED)
        iter_ht = results.filter_rows(part, algorithm="fed-iter-ht", setting=iter_ht_setting)
        name = metric_name(task, "quality")
        checks += check_difference({"task": task, "what": "as accurate"}, f"{name} minus FedAvg's", pa, fed_avg, "value", -AS_ACCURATE)
        checks += check_bytes({"task": task, "what": "far fewer bytes"}, "bytes of FedAvg over FLoPS-PA", fed_avg, pa, FEWER_BYTES)
        checks += check_bytes({"task": task, "what": "twice FedIter-HT"}, "bytes over FedIter-HT", pa, iter_ht, TWICE_THE_BYTES)
    return checks


def check_bytes(
    case: dict[str, Any], quantity: str, rows: Sequence[Row], base: Sequence[Row], bounds: tuple[float, float | None]
) -> list[Check]:
    """Return the check of a ratio of bytes by the paper's formula, which has 32 bits per value; the ratio on the wire is noted."""
    ratios, on_wire = byte_ratios(rows, base, "_paper_formula"), byte_ratios(rows, base)
    bits = [row["config"]["algorithm"]["bits"] for part in (rows, base) for row in results.done_rows(part)[:1]]
    note = f"on the wire {sum(on_wire) / len(on_wire):.2f}, with {' and '.join(map(str, bits))} bits per value" if on_wire else ""
    check = make_check(case, quantity, ratios, at_least=bounds[0], at_most=bounds[1], note=note)
    return [check] if check else []


def byte_ratios(rows: Sequence[Row], base: Sequence[Row], count: str = "") -> list[float]:
    """Return the ratio of bytes on each seed that both finished."""
    sent, reference = ({row["seed"]: results.total_bytes(row, count) for row in results.done_rows(part)} for part in (rows, base))
    return [sent[seed] / reference[seed] for seed in sorted(sent.keys() & reference.keys())]


def rounds_needed(row: Row) -> float:
    """Return the first stored round at nine tenths of the best possible value; infinity if there is none."""
    if row["state"] != results.DONE:
        return inf
    goal = 0.9 * row["values"]["oracle_value"]
    pairs = zip(row["curves"]["round"], row["curves"][row["metric"]], strict=True)
    return next((number for number, value in pairs if value >= goal), inf)


def pa_converges_faster(studies: Studies, setting: str) -> list[Check]:
    """57: FLoPS-PA needs fewer rounds than FedIter-HT, and under heterogeneity at most a fifth more than without."""
    rows = results.filter_rows(studies.get("convergence", []), part="instances")

    def finished_or_diverged(algorithm: str, setting: str, skew: str) -> list[Row]:
        found = results.filter_rows(rows, algorithm=algorithm, setting=setting, skew=skew)
        return [row for row in found if row["state"] != results.FAILED]

    pa = {skew: finished_or_diverged("flops-pa", setting, skew) for skew in (IID, NON_IID)}
    checks = []
    for iter_ht_setting, skew in product((PUBLISHED, TUNED), (IID, NON_IID)):
        case = {ITER_HT_SETTING: iter_ht_setting, "skew": skew, "what": "faster"}
        quantity = "rounds to 90 % of the best possible, minus FedIter-HT's"
        checks.append(check_rounds(case, quantity, pa[skew], finished_or_diverged("fed-iter-ht", iter_ht_setting, skew)))
    case = {"what": "as fast under heterogeneity"}
    checks.append(check_rounds(case, "rounds minus 1.2 times those of IID clients", pa[NON_IID], pa[IID], SLOWER))
    return [check for check in checks if check]


def check_rounds(case: dict[str, Any], quantity: str, rows: Sequence[Row], base: Sequence[Row], factor: float = 1.0) -> Check | None:
    """Return the check that runs need at most `factor` times the rounds of others.

    A run that never arrives counts as one round more than it has. Seeds on which neither run arrives decide nothing.
    """
    needed, reference = ({row["seed"]: (rounds_needed(row), row["config"]["rounds"] + 1) for row in part} for part in (rows, base))
    shared = sorted(needed.keys() & reference.keys())
    compared = [seed for seed in shared if min(needed[seed][0], reference[seed][0]) < inf]
    values = [min(needed[seed]) - factor * min(reference[seed]) for seed in compared]
    num_open = len(shared) - len(compared)
    note = f"neither arrives on {num_open} of {len(shared)} seeds" if num_open else ""
    return make_check(case, quantity, values, at_most=0.0, note=note)


def decades_of_good_rates(groups: Sequence[Sequence[Row]], best: int, accepted: Sequence[str]) -> float:
    """Return log10 of the range of rates around the best one whose loss against it has an accepted outcome."""
    losses = [
        make_check({}, "", paired_values(group, groups[best], "value"), at_least=-RATE_LOSS, unfinished=count_unfinished(group))
        for group in groups
    ]
    is_good = [check is not None and check.outcome in accepted for check in losses]
    low = high = best
    while low > 0 and is_good[low - 1]:
        low -= 1
    while high < len(groups) - 1 and is_good[high + 1]:
        high += 1
    return log10(groups[high][0]["label"]["rate"] / groups[low][0]["label"]["rate"])


def rates_are_stable(studies: Studies, setting: str) -> list[Check]:
    """58: the rates around the best one that lose at most .05 without a failed run span at least a decade."""
    checks = []
    rows = results.filter_rows(studies.get("learning-rates", []), algorithm="flops-pa", setting=SWEPT_STEP_RULES[setting])
    for sweep in results.label_values(rows, "sweep"):
        groups = results.group_by_label(results.filter_rows(rows, sweep=sweep))
        groups.sort(key=lambda group: group[0]["label"]["rate"])
        means = [None if results.diverged_or_failed_rows(group) else results.mean_over_seeds(group, "value") for group in groups]
        best_mean, best = max((-inf if mean is None else mean, i) for i, mean in enumerate(means))
        quantity = "decades of good learning rates"
        if best_mean < MIN_WORKING_R2:
            num_failed = sum(mean is None for mean in means)
            note = f"no rate has an R2 of {MIN_WORKING_R2:g}; {num_failed} of {len(means)} rates have runs that did not finish"
            checks.append(make_check({"sweep": sweep}, quantity, [], unfinished=note))
            continue
        certain, possible = (decades_of_good_rates(groups, best, accepted) for accepted in ((HOLDS,), (HOLDS, UNDECIDED)))
        note = f"best r2 {best_mean:.3f} at {groups[best][0]['label']['rate']:g}"
        checks.append(make_range_check({"sweep": sweep}, quantity, certain, possible, at_least=RATE_DECADES - 1e-9, note=note))
    return [check for check in checks if check]


def starts_work(studies: Studies, setting: str) -> list[Check]:
    """59: every start, scaling rate and prune start ends within .01 of the best one of its algorithm."""
    checks: list[Check] = []
    for algorithm in UNCONSTRAINED:
        groups = results.group_by_label(results.filter_rows(studies.get("starts", []), algorithm=algorithm, setting=setting))
        finished = [group for group in groups if not results.diverged_or_failed_rows(group)]
        best = max(finished, key=lambda group: results.mean_over_seeds(group, "value") or 0.0, default=[])
        for group in groups:
            case = {key: entry for key, entry in group[0]["label"].items() if key not in ("task", "setting")}
            values = paired_values(group, best, "value")
            check = make_check(case, "r2 minus that of the best start", values, at_least=-SAME_RESULT, unfinished=count_unfinished(group))
            checks += [check] if check else []
    return checks


class Claim(NamedTuple):
    """A claim: its text, the function that evaluates it, and the keys of cases by which verdicts may differ."""

    text: str
    evaluate: Callable[[Studies, str], list[Check]]
    group_keys: tuple[str, ...]


CLAIMS = {
    51: Claim("rho is reached under heterogeneity with little loss", density_reached, ("algorithm", "task")),
    52: Claim("FLoPS beats FedIter-HT everywhere", flops_beats_iter_ht, (ITER_HT_SETTING, "task")),
    53: Claim("FLoPS(0.05) beats FLoPS(0.95) on sparse truth", sparse_model_is_better, ("task",)),
    54: Claim("expected and test-time gates fall to the target", gates_reach_target, ("scaling", "task")),
    55: Claim("the overlap is stable, then active, then stable", iou_phases, ("algorithm", ITER_HT_SETTING)),
    56: Claim("FLoPS-PA is as accurate as FedAvg with far fewer bytes, twice those of FedIter-HT", pa_is_cheaper, ("what", "task")),
    57: Claim("FLoPS-PA converges faster than FedIter-HT, and as fast under heterogeneity", pa_converges_faster, ("what", ITER_HT_SETTING)),
    58: Claim("a wide stable range of learning rates", rates_are_stable, ("sweep",)),
    59: Claim("dense-to-sparse and sparse-to-sparse starts both work", starts_work, ("algorithm", "start")),
}


def evaluate_claims(studies: Studies) -> list[Verdict]:
    """Return a verdict on every claim and recipe from the rows of the available studies."""
    return [
        make_verdict(number, claim.text, recipe, claim.evaluate(studies, setting), claim.group_keys)
        for number, claim in CLAIMS.items()
        for recipe, setting in RECIPES.items()
    ]


def make_document(studies: Studies, scale: str) -> dict[str, Any]:
    """Return the content of claims.json: every claim that the rows can evaluate, with scale, versions, seeds and data of the runs."""
    evaluated = [verdict for verdict in evaluate_claims(studies) if verdict.verdict != NOT_EVALUATED]
    rows = [row for study in studies.values() for row in study if row["label"].get("task") in TASKS]
    versions = sorted({row["version"] for row in rows})
    about = {"scale": scale, "versions": versions, "seeds": results.distinct_seeds(rows), "data": results.describe_data(rows)}
    return to_document(evaluated, **about)
