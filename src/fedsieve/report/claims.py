"""The paper's claims, judged from stored rows: held, not held, or held only when."""

from collections.abc import Callable, Iterable, Mapping
from math import log10
from typing import Any, NamedTuple

from fedsieve.report.tables import group_by_label, metric_name
from fedsieve.studies import results
from fedsieve.studies.results import Row

HELD, NOT_HELD, NOT_EVALUATED = "held", "not held", "not judged"
Studies = Mapping[str, list[Row]]


class Check(NamedTuple):
    """The claim in one case: whether it holds there, and the numbers."""

    case: dict[str, Any]
    holds: bool
    evidence: str


class Verdict(NamedTuple):
    """What became of a claim."""

    number: int
    claim: str
    verdict: str
    checks: list[Check]

    def to_markdown(self) -> str:
        """The verdict and every case."""
        cases = [f"- {'yes' if check.holds else 'NO'}: {_format_case(check.case)}: {check.evidence}" for check in self.checks]
        return "\n".join([f"## {self.number}. {self.claim}", "", f"**{self.verdict}**", "", *cases, ""])


def summarize_checks(checks: list[Check]) -> str:
    """One line for all cases; where only some hold, the single circumstance that explains them if there is one."""
    held = [check for check in checks if check.holds]
    if not checks:
        return NOT_EVALUATED
    if len(held) == len(checks):
        return HELD
    if not held:
        return NOT_HELD
    for key in dict.fromkeys(key for check in checks for key in check.case):
        good = {check.case.get(key) for check in held}
        if all((check.case.get(key) in good) == check.holds for check in checks) and None not in good:
            return f"held only when {key} is {' or '.join(map(str, dict.fromkeys(check.case[key] for check in held)))}"
    if len(held) <= 3:
        return f"held only when {'; or '.join(_format_case(check.case) for check in held)}"
    lost = [f"({_format_case(check.case)})" for check in checks if not check.holds]
    more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
    return f"held only when not {', '.join(lost[:4])}{more}: {len(held)} of {len(checks)} cases"


def _format_case(case: Mapping[str, Any]) -> str:
    return ", ".join(str(value) if key in ("task", "method", "what") else f"{key} {value}" for key, value in case.items())


def is_significantly_better(rows: list[Row], base: list[Row], measure: str) -> tuple[bool, str] | None:
    """Whether the paired difference is above 0 by more than its 95 % interval; None where no seed has both."""
    found = results.difference_over_seeds(rows, base, measure)
    if found["difference"] is None:
        return None
    interval = found["interval"] or 0.0
    return found["difference"] > interval, f"{measure} {found['difference']:+.3f} ± {interval:.3f}"


def density_reached(studies: Studies) -> list[Check]:
    """51: FLoPS ends at its density under heterogeneity, and loses little against homogeneous clients."""
    checks = []
    for group in group_by_label(results.filter_rows(studies.get("table-2", []), method="flops", skew="non-iid")):
        label, finished = group[0]["label"], results.done_rows(group)
        case = {"task": label["task"], "target": label["target"]}
        if not finished:
            continue
        gates = results.mean_and_sd_over_seeds(group, "test_density")["mean"]
        near = all(abs(row["values"]["test_density"] - row["density"]) <= 0.05 * row["density"] for row in finished)
        checks.append(Check(case | {"what": "density"}, near, f"open test-time gates {gates:.4f}"))
        measure = metric_name(label["task"], "quality")
        calm = results.mean_and_sd_over_seeds(results.filter_rows(studies["table-2"], **(label | {"skew": "iid"})), measure)["mean"]
        if calm is not None:
            lost = calm - results.mean_and_sd_over_seeds(group, measure)["mean"]
            checks.append(Check(case | {"what": "little loss"}, lost <= 0.05, f"{measure} {lost:.3f} below IID (0.05 allowed)"))
    return checks


def flops_beats_iter_ht(studies: Studies) -> list[Check]:
    """52: FLoPS beats FedIter-HT: quality in Tables 1 and 2, TDR in the other regimes."""
    checks = []
    for name, part in (("table-1", "quality"), ("table-2", "quality"), ("regimes", "tdr")):
        for base in group_by_label(results.filter_rows(studies.get(name, []), method="fed-iter-ht")):
            label = dict(base[0]["label"])
            mine = results.filter_rows(studies[name], **(label | {"method": "flops", "setting": "tuned"}))
            if (found := is_significantly_better(mine, base, metric_name(label["task"], part))) is not None:
                place = {key: label[key] for key in ("task", "truth", "skew", "regime") if key in label}
                checks.append(Check({"setting of FedIter-HT": label["setting"], **place, "in": name}, *found))
    return checks


def sparse_model_is_better(studies: Studies) -> list[Check]:
    """53: on sparse truth, FLoPS(0.05) beats FLoPS(0.95)."""
    rows = studies.get("table-1", [])
    pairs = ((task, *(results.filter_rows(rows, task=task, method="flops", target=t) for t in (0.05, 0.95))) for task in ("lr", "lg", "mc"))
    found = ((task, is_significantly_better(one, other, metric_name(task, "quality"))) for task, one, other in pairs)
    return [Check({"task": task}, *result) for task, result in found if result is not None]


def gates_reach_target(studies: Studies) -> list[Check]:
    """54: the share of open test-time gates falls to the target; with log-alpha scaling, and by the paper's dual alone."""
    groups = [({"scaling": "on"}, group) for group in group_by_label(studies.get("gates", []))]
    alone = results.filter_rows(studies.get("constraint", []), variant="the paper's dual", start="dense")
    groups += [({"scaling": "off", "target": group[0]["label"]["target"]}, group) for group in group_by_label(alone)]
    checks = []
    for case, group in groups:
        finished = results.done_rows(group)
        if finished:
            ends = [(row["curves"]["test_density"][0], row["values"]["test_density"], row["density"]) for row in finished]
            holds = all(first > last and abs(last - target) <= 0.05 * target for first, last, target in ends)
            first, last = (sum(end[i] for end in ends) / len(ends) for i in (0, 1))
            checks.append(Check({"task": group[0]["label"]["task"], **case}, holds, f"from {first:.3f} to {last:.3f}"))
    return checks


def iou_phases(studies: Studies) -> list[Check]:
    """55: overlap of consecutive epochs is high, then low, then high in FLoPS, while FedIter-HT keeps changing to the end."""
    checks = []
    for group in group_by_label(studies.get("iou", [])):
        label = group[0]["label"]
        steps = [[row["trace"]["overlap"][i][i + 1] for i in range(len(row["trace"]["overlap"]) - 1)] for row in results.done_rows(group)]
        if not steps:
            continue
        path = [sum(values) / len(steps) for values in zip(*steps, strict=True)]
        quarter = max(len(path) // 4, 1)
        begin, lowest, end = sum(path[:quarter]) / quarter, min(path[quarter:]), sum(path[-quarter:]) / quarter
        said = f"first quarter {begin:.3f}, lowest after it {lowest:.3f}, last quarter {end:.3f}"
        if label["method"] == "flops":
            checks.append(
                Check(
                    {"method": "flops", "what": "stable, active, stable"}, min(begin, end) >= 0.9 and lowest < min(begin, end) - 0.02, said
                )
            )
        else:
            case = {"method": label["method"], "setting of FedIter-HT": label["setting"], "what": "changes to the end"}
            checks.append(Check(case, end < 0.99, said))
    return checks


def pa_is_cheaper(studies: Studies) -> list[Check]:
    """56: FLoPS-PA is as accurate as FedAvg (within .01) at far fewer bytes, twice those of FedIter-HT."""
    checks = []
    for name, part in (("communication", {}), ("convergence", {"part": "curves"})):
        for task in ("lr", "lg", "mc"):
            methods = ("flops-pa", "fed-avg", "fed-iter-ht")
            rows = {
                m: results.done_rows(results.filter_rows(studies.get(name, []), task=task, method=m, setting="tuned", **part))
                for m in methods
            }
            if not all(rows.values()) or any(check.case["task"] == task for check in checks):
                continue
            found = results.difference_over_seeds(rows["flops-pa"], rows["fed-avg"], "value")
            said = f"{found['difference']:+.3f} ± {found['interval'] or 0:.3f} against FedAvg"
            checks.append(Check({"task": task, "what": "as accurate"}, found["difference"] >= -0.01, said))
            sent = {
                m: sum(row["bytes"]["up_paper_formula"] + row["bytes"]["down_paper_formula"] for row in rows[m]) / len(rows[m])
                for m in methods
            }
            wire = {m: sum(row["bytes"]["up"] + row["bytes"]["down"] for row in rows[m]) / len(rows[m]) for m in methods}
            twice, less = sent["flops-pa"] / sent["fed-iter-ht"], sent["fed-avg"] / sent["flops-pa"]
            said = f"{less:.1f} times less than FedAvg by the formula, {wire['fed-avg'] / wire['flops-pa']:.1f} on the wire"
            checks.append(Check({"task": task, "what": "far fewer bytes"}, less >= 5, said))
            said = f"{twice:.2f} times FedIter-HT by the formula, {wire['flops-pa'] / wire['fed-iter-ht']:.2f} on the wire"
            checks.append(Check({"task": task, "what": "twice FedIter-HT"}, 1.8 <= twice <= 2.2, said))
    return checks


def rounds_needed(row: Row) -> float:
    """The first stored round at nine tenths of the best possible value; one more than there are if it never comes."""
    goal = 0.9 * row["values"]["oracle_value"]
    pairs = zip(row["curves"]["round"], row["curves"][row["metric"]], strict=True)
    return next((number for number, value in pairs if value >= goal), row["rounds"] + 1)


def pa_converges_faster(studies: Studies) -> list[Check]:
    """57: FLoPS-PA needs fewer rounds than FedIter-HT, and under heterogeneity hardly more than without."""
    rows = results.filter_rows(studies.get("convergence", []), part="instances")

    def mean_rounds(algorithm: str, setting: str, skew: str) -> float | None:
        found = [rounds_needed(row) for row in results.done_rows(results.filter_rows(rows, method=algorithm, setting=setting, skew=skew))]
        return sum(found) / len(found) if found else None

    checks = []
    own = {skew: mean_rounds("flops-pa", "tuned", skew) for skew in ("iid", "non-iid")}
    for setting in ("as published", "tuned"):
        for skew in ("iid", "non-iid"):
            other = mean_rounds("fed-iter-ht", setting, skew)
            if own[skew] is not None and other is not None:
                case = {"setting of FedIter-HT": setting, "skew": skew, "what": "faster"}
                checks.append(
                    Check(case, own[skew] < other, f"{own[skew]:.1f} rounds to 90 % of the best possible, FedIter-HT {other:.1f}")
                )
    if None not in own.values():
        said = f"{own['non-iid']:.1f} rounds, IID {own['iid']:.1f}"
        checks.append(Check({"what": "as fast under heterogeneity"}, own["non-iid"] <= 1.2 * own["iid"], said))
    return checks


def rates_are_stable(studies: Studies) -> list[Check]:
    """58: around the best rate, the rates that lose at most .05 without a failed run span at least a factor of ten."""
    checks = []
    rows = results.filter_rows(studies.get("learning-rates", []), method="flops-pa")
    for setting, sweep in dict.fromkeys((row["label"]["setting"], row["label"]["sweep"]) for row in rows):
        line = [(group[0]["label"]["rate"], group) for group in group_by_label(results.filter_rows(rows, setting=setting, sweep=sweep))]
        line = sorted(
            (rate, results.mean_and_sd_over_seeds(group, "value")["mean"] if not results.diverged_or_failed_rows(group) else None)
            for rate, group in line
        )
        there = [value for _, value in line if value is not None]
        case = {"step": setting, "sweep": sweep}
        if not there or max(there) < 0.5:
            checks.append(Check(case, False, f"no rate works; {len(line) - len(there)} of {len(line)} rates have failed runs"))
            continue
        good = [value is not None and value >= max(there) - 0.05 for _, value in line]
        best = next(i for i, (_, value) in enumerate(line) if value == max(there))
        low = high = best
        while low > 0 and good[low - 1]:
            low -= 1
        while high < len(line) - 1 and good[high + 1]:
            high += 1
        said = f"best {max(there):.3f}; from {line[low][0]:g} to {line[high][0]:g} within .05 of it"
        checks.append(Check(case, log10(line[high][0] / line[low][0]) >= 1 - 1e-9, said))
    return checks


def starts_work(studies: Studies) -> list[Check]:
    """59: every start, scaling rate and prune start ends within .01 of the best one of its method."""
    checks = []
    for method in ("flops", "flops-pa"):
        groups = group_by_label(results.filter_rows(studies.get("starts", []), method=method))
        ends = [results.mean_and_sd_over_seeds(group, "value")["mean"] for group in groups]
        best = max((end for end in ends if end is not None), default=None)
        for group, end in zip(groups, ends, strict=True):
            case = {key: value for key, value in group[0]["label"].items() if key != "task"}
            holds = end is not None and not results.diverged_or_failed_rows(group) and end >= best - 0.01
            checks.append(Check(case, holds, "failed" if end is None else f"{end:.3f}, best {best:.3f}"))
    return checks


CLAIMS: dict[int, tuple[str, Callable[[Studies], list[Check]]]] = {
    51: ("rho is reached under heterogeneity with little loss", density_reached),
    52: ("FLoPS beats FedIter-HT everywhere", flops_beats_iter_ht),
    53: ("FLoPS(0.05) beats FLoPS(0.95) on sparse truth", sparse_model_is_better),
    54: ("test-time gates fall to the target", gates_reach_target),
    55: ("overlap goes stable, active, stable", iou_phases),
    56: ("FLoPS-PA is as accurate as FedAvg at far fewer bytes, twice FedIter-HT's", pa_is_cheaper),
    57: ("FLoPS-PA converges faster than FedIter-HT, and as fast under heterogeneity", pa_converges_faster),
    58: ("a wide stable range of learning rates", rates_are_stable),
    59: ("dense-to-sparse and sparse-to-sparse starts both work", starts_work),
}


def evaluate_claims(studies: Studies) -> list[Verdict]:
    """Every claim, from the rows of the studies there are."""
    judged: Iterable[tuple[int, str, list[Check]]] = ((number, claim, find(studies)) for number, (claim, find) in CLAIMS.items())
    return [Verdict(number, claim, summarize_checks(checks), checks) for number, claim, checks in judged]
