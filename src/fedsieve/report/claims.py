"""The claims of the paper, evaluated on stored rows: held, not held, or held only under some condition."""

from collections.abc import Callable, Mapping
from math import log10
from typing import Any, NamedTuple

from fedsieve.report.tables import DENSITY_TOLERANCE, metric_name
from fedsieve.studies import results
from fedsieve.studies.results import IID, NON_IID, PAPER_DUAL, PUBLISHED, TUNED, Row

HELD, NOT_HELD, NOT_EVALUATED = "held", "not held", "not evaluated"
ITER_HT_SETTING = "setting of FedIter-HT"
MAX_LISTED_CASES = 4
"""Maximum number of cases that a verdict lists."""
Studies = Mapping[str, list[Row]]


class Check(NamedTuple):
    """A claim in one case: whether it holds, and the numbers."""

    case: dict[str, Any]
    holds: bool
    evidence: str


class Verdict(NamedTuple):
    """A claim, its verdict, and the checks that lead to it."""

    number: int
    claim: str
    verdict: str
    checks: list[Check]

    def to_markdown(self) -> str:
        """Return the verdict and every case."""
        cases = [f"- {'yes' if check.holds else 'NO'}: {_format_case(check.case)}: {check.evidence}" for check in self.checks]
        return "\n".join([f"## {self.number}. {self.claim}", "", f"**{self.verdict}**", "", *cases, ""])


def summarize_checks(checks: list[Check]) -> str:
    """Return the verdict on all cases. If only some hold, name the single property that separates them if there is one."""
    held = [check for check in checks if check.holds]
    if not checks:
        return NOT_EVALUATED
    if len(held) == len(checks):
        return HELD
    if not held:
        return NOT_HELD
    for key in dict.fromkeys(key for check in checks for key in check.case):
        values = {check.case.get(key) for check in held}
        if all((check.case.get(key) in values) == check.holds for check in checks) and None not in values:
            return f"held only when {key} is {' or '.join(map(str, dict.fromkeys(check.case[key] for check in held)))}"
    if len(held) < MAX_LISTED_CASES:
        return f"held only when {'; or '.join(_format_case(check.case) for check in held)}"
    exceptions = [f"({_format_case(check.case)})" for check in checks if not check.holds]
    more = f" and {len(exceptions) - MAX_LISTED_CASES} more" if len(exceptions) > MAX_LISTED_CASES else ""
    return f"held only when not {', '.join(exceptions[:MAX_LISTED_CASES])}{more}: {len(held)} of {len(checks)} cases"


def _format_case(case: Mapping[str, Any]) -> str:
    return ", ".join(str(value) if key in ("task", "algorithm", "what") else f"{key} {value}" for key, value in case.items())


def is_significantly_better(rows: list[Row], base: list[Row], measure: str) -> tuple[bool, str] | None:
    """Return whether the paired difference exceeds its 95 % interval, and the numbers; None if no seed has both."""
    paired = results.difference_over_seeds(rows, base, measure)
    if paired["difference"] is None:
        return None
    interval = paired["interval"] or 0.0
    return paired["difference"] > interval, f"{measure} {paired['difference']:+.3f} ± {interval:.3f}"


def is_near(density: float, target: float) -> bool:
    """Return whether a density is within the tolerance of its target."""
    return abs(density - target) <= DENSITY_TOLERANCE * target


def density_reached(studies: Studies) -> list[Check]:
    """51: FLoPS reaches its density under heterogeneity, and loses little against homogeneous clients."""
    rows = studies.get("table-2", [])
    checks = []
    for group in results.group_by_label(results.filter_rows(rows, algorithm="flops", skew=NON_IID)):
        label, finished = group[0]["label"], results.done_rows(group)
        if not finished:
            continue
        case = {"task": label["task"], "target": label["target"]}
        reached = all(is_near(row["values"]["test_density"], row["density"]) for row in finished)
        evidence = f"open test-time gates {results.mean_over_seeds(group, 'test_density'):.4f}"
        checks.append(Check(case | {"what": "density"}, reached, evidence))
        measure = metric_name(label["task"], "quality")
        homogeneous = results.mean_over_seeds(results.filter_rows(rows, **(label | {"skew": IID})), measure)
        heterogeneous = results.mean_over_seeds(group, measure)
        if homogeneous is not None and heterogeneous is not None:
            loss = homogeneous - heterogeneous
            checks.append(Check(case | {"what": "little loss"}, loss <= 0.05, f"{measure} {loss:.3f} below IID (0.05 allowed)"))
    return checks


def flops_beats_iter_ht(studies: Studies) -> list[Check]:
    """52: FLoPS beats FedIter-HT: in quality in Tables 1 and 2, in TDR in the other regimes."""
    checks = []
    for study, measure in (("table-1", "quality"), ("table-2", "quality"), ("regimes", "tdr")):
        for base in results.group_by_label(results.filter_rows(studies.get(study, []), algorithm="fed-iter-ht")):
            label = base[0]["label"]
            flops = results.filter_rows(studies[study], **(label | {"algorithm": "flops", "setting": TUNED}))
            if (result := is_significantly_better(flops, base, metric_name(label["task"], measure))) is not None:
                case = {key: label[key] for key in ("task", "truth", "skew", "regime") if key in label}
                checks.append(Check({ITER_HT_SETTING: label["setting"], **case, "in": study}, *result))
    return checks


def sparse_model_is_better(studies: Studies) -> list[Check]:
    """53: on sparse truth, FLoPS(0.05) beats FLoPS(0.95)."""
    rows = results.filter_rows(studies.get("table-1", []), algorithm="flops")
    checks = []
    for task in ("lr", "lg", "mc"):
        sparse, dense = (results.filter_rows(rows, task=task, target=target) for target in (0.05, 0.95))
        if (result := is_significantly_better(sparse, dense, metric_name(task, "quality"))) is not None:
            checks.append(Check({"task": task}, *result))
    return checks


def gates_reach_target(studies: Studies) -> list[Check]:
    """54: the fraction of open test-time gates falls to the target, with log-alpha scaling and by the paper's dual alone."""
    groups = [({"scaling": "on"}, group) for group in results.group_by_label(studies.get("gates", []))]
    without_scaling = results.filter_rows(studies.get("constraint", []), variant=PAPER_DUAL, start="dense")
    groups += [({"scaling": "off", "target": group[0]["label"]["target"]}, group) for group in results.group_by_label(without_scaling)]
    checks = []
    for case, group in groups:
        finished = results.done_rows(group)
        if finished:
            paths = [(row["curves"]["test_density"][0], row["values"]["test_density"], row["density"]) for row in finished]
            holds = all(first > last and is_near(last, target) for first, last, target in paths)
            first, last = (sum(path[i] for path in paths) / len(paths) for i in (0, 1))
            checks.append(Check({"task": group[0]["label"]["task"], **case}, holds, f"from {first:.3f} to {last:.3f}"))
    return checks


def iou_phases(studies: Studies) -> list[Check]:
    """55: the overlap of consecutive epochs is high, then low, then high in FLoPS, while FedIter-HT changes until the end."""
    checks = []
    for group in results.group_by_label(studies.get("iou", [])):
        label = group[0]["label"]
        overlaps = [row["trace"]["overlap"] for row in results.done_rows(group)]
        if not overlaps:
            continue
        consecutive = [[overlap[i][i + 1] for i in range(len(overlap) - 1)] for overlap in overlaps]
        path = [sum(values) / len(consecutive) for values in zip(*consecutive, strict=True)]
        quarter = max(len(path) // 4, 1)
        begin, lowest, end = sum(path[:quarter]) / quarter, min(path[quarter:]), sum(path[-quarter:]) / quarter
        evidence = f"first quarter {begin:.3f}, lowest after it {lowest:.3f}, last quarter {end:.3f}"
        if label["algorithm"] == "flops":
            case = {"algorithm": "flops", "what": "stable, active, stable"}
            checks.append(Check(case, min(begin, end) >= 0.9 and lowest < min(begin, end) - 0.02, evidence))
        else:
            case = {"algorithm": label["algorithm"], ITER_HT_SETTING: label["setting"], "what": "changes until the end"}
            checks.append(Check(case, end < 0.99, evidence))
    return checks


def pa_is_cheaper(studies: Studies) -> list[Check]:
    """56: FLoPS-PA is as accurate as FedAvg (within .01) with far fewer bytes, twice those of FedIter-HT."""
    checks: list[Check] = []
    algorithms = ("flops-pa", "fed-avg", "fed-iter-ht")
    for study, label in (("communication", {}), ("convergence", {"part": "curves"})):
        evaluated_tasks = {check.case["task"] for check in checks}
        for task in ("lr", "lg", "mc"):
            rows = results.done_rows(results.filter_rows(studies.get(study, []), task=task, setting=TUNED, **label))
            pa, fed_avg, iter_ht = (results.filter_rows(rows, algorithm=name) for name in algorithms)
            paired = results.difference_over_seeds(pa, fed_avg, "value")
            if task in evaluated_tasks or not iter_ht or paired["difference"] is None:
                continue
            evidence = f"{paired['difference']:+.3f} ± {paired['interval'] or 0:.3f} against FedAvg"
            checks.append(Check({"task": task, "what": "as accurate"}, paired["difference"] >= -0.01, evidence))
            less, less_wire = (mean_bytes(fed_avg, count) / mean_bytes(pa, count) for count in ("_paper_formula", ""))
            twice, twice_wire = (mean_bytes(pa, count) / mean_bytes(iter_ht, count) for count in ("_paper_formula", ""))
            evidence = f"{less:.1f} times less than FedAvg by the formula, {less_wire:.1f} on the wire"
            checks.append(Check({"task": task, "what": "far fewer bytes"}, less >= 5, evidence))
            evidence = f"{twice:.2f} times FedIter-HT by the formula, {twice_wire:.2f} on the wire"
            checks.append(Check({"task": task, "what": "twice FedIter-HT"}, 1.8 <= twice <= 2.2, evidence))
    return checks


def mean_bytes(rows: list[Row], count: str) -> float:
    """Return the mean bytes of finished runs, of which there is at least one."""
    return sum(results.total_bytes(row, count) for row in rows) / len(rows)


def rounds_needed(row: Row) -> float:
    """Return the first stored round at nine tenths of the best possible value; one more than all rounds if there is none."""
    goal = 0.9 * row["values"]["oracle_value"]
    pairs = zip(row["curves"]["round"], row["curves"][row["metric"]], strict=True)
    return next((number for number, value in pairs if value >= goal), row["rounds"] + 1)


def pa_converges_faster(studies: Studies) -> list[Check]:
    """57: FLoPS-PA needs fewer rounds than FedIter-HT, and under heterogeneity hardly more than without."""
    rows = results.done_rows(results.filter_rows(studies.get("convergence", []), part="instances"))

    def mean_rounds(algorithm: str, setting: str, skew: str) -> float | None:
        counts = [rounds_needed(row) for row in results.filter_rows(rows, algorithm=algorithm, setting=setting, skew=skew)]
        return sum(counts) / len(counts) if counts else None

    checks = []
    iid, non_iid = (mean_rounds("flops-pa", TUNED, skew) for skew in (IID, NON_IID))
    for setting in (PUBLISHED, TUNED):
        for skew, pa in ((IID, iid), (NON_IID, non_iid)):
            iter_ht = mean_rounds("fed-iter-ht", setting, skew)
            if pa is not None and iter_ht is not None:
                case = {ITER_HT_SETTING: setting, "skew": skew, "what": "faster"}
                checks.append(Check(case, pa < iter_ht, f"{pa:.1f} rounds to 90 % of the best possible, FedIter-HT {iter_ht:.1f}"))
    if iid is not None and non_iid is not None:
        evidence = f"{non_iid:.1f} rounds, IID {iid:.1f}"
        checks.append(Check({"what": "as fast under heterogeneity"}, non_iid <= 1.2 * iid, evidence))
    return checks


def rates_are_stable(studies: Studies) -> list[Check]:
    """58: the rates around the best one that lose at most .05 without a failed run span at least a factor of ten."""
    checks = []
    rows = results.filter_rows(studies.get("learning-rates", []), algorithm="flops-pa")
    for setting, sweep in results.label_values(rows, "setting", "sweep"):
        case = {"step": setting, "sweep": sweep}
        groups = results.group_by_label(results.filter_rows(rows, setting=setting, sweep=sweep))
        groups.sort(key=lambda group: group[0]["label"]["rate"])
        rates = [group[0]["label"]["rate"] for group in groups]
        values = [None if results.diverged_or_failed_rows(group) else results.mean_over_seeds(group, "value") for group in groups]
        best = max((value for value in values if value is not None), default=0.0)
        if best < 0.5:
            num_failed = sum(value is None for value in values)
            checks.append(Check(case, False, f"no rate works; {num_failed} of {len(values)} rates have failed runs"))
            continue
        is_good = [value is not None and value >= best - 0.05 for value in values]
        low = high = values.index(best)
        while low > 0 and is_good[low - 1]:
            low -= 1
        while high < len(rates) - 1 and is_good[high + 1]:
            high += 1
        evidence = f"best {best:.3f}; from {rates[low]:g} to {rates[high]:g} within .05 of it"
        checks.append(Check(case, log10(rates[high] / rates[low]) >= 1 - 1e-9, evidence))
    return checks


def starts_work(studies: Studies) -> list[Check]:
    """59: every start, scaling rate and prune start ends within .01 of the best one of its algorithm."""
    checks = []
    for algorithm in ("flops", "flops-pa"):
        groups = results.group_by_label(results.filter_rows(studies.get("starts", []), algorithm=algorithm))
        values = [results.mean_over_seeds(group, "value") for group in groups]
        best = max((value for value in values if value is not None), default=0.0)
        for group, value in zip(groups, values, strict=True):
            case = {key: entry for key, entry in group[0]["label"].items() if key != "task"}
            holds = value is not None and not results.diverged_or_failed_rows(group) and value >= best - 0.01
            checks.append(Check(case, holds, "failed" if value is None else f"{value:.3f}, best {best:.3f}"))
    return checks


CLAIMS: dict[int, tuple[str, Callable[[Studies], list[Check]]]] = {
    51: ("rho is reached under heterogeneity with little loss", density_reached),
    52: ("FLoPS beats FedIter-HT everywhere", flops_beats_iter_ht),
    53: ("FLoPS(0.05) beats FLoPS(0.95) on sparse truth", sparse_model_is_better),
    54: ("test-time gates fall to the target", gates_reach_target),
    55: ("the overlap is stable, then active, then stable", iou_phases),
    56: ("FLoPS-PA is as accurate as FedAvg with far fewer bytes, twice those of FedIter-HT", pa_is_cheaper),
    57: ("FLoPS-PA converges faster than FedIter-HT, and as fast under heterogeneity", pa_converges_faster),
    58: ("a wide stable range of learning rates", rates_are_stable),
    59: ("dense-to-sparse and sparse-to-sparse starts both work", starts_work),
}


def evaluate_claims(studies: Studies) -> list[Verdict]:
    """Return a verdict on every claim from the rows of the available studies."""
    evaluated = [(number, claim, evaluate(studies)) for number, (claim, evaluate) in CLAIMS.items()]
    return [Verdict(number, claim, summarize_checks(checks), checks) for number, claim, checks in evaluated]
